"""Files to bytes to JSON, strictly, and where each member stands. Knows nothing of rank tables."""
