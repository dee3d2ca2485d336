"""make mutants: whether the tests notice small faults."""
