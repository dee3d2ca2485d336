"""Dry runs: a job of any size seen from one process, before it runs."""
