"""Logs that are rotated: the log writer and its pipes."""
