"""Degrees of parallelism searched for together: data, operator, pipeline and optimizer parallel, copies, recompute."""
