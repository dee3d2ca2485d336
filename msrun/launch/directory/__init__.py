"""The log directory of a job: its lock, its files, what earlier jobs left, reading it."""
