"""Model and its callbacks."""
