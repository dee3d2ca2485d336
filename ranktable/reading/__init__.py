"""Bytes to JSON, strictly, and where each of its members stands. Knows nothing of rank tables but how to read one."""
