"""Random small networks, ways to train them in parallel, and the comparison with one process."""
