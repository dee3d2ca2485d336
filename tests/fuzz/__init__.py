"""Seeded, bounded noise for everything that reads what somebody else has written."""
