"""The first line."""

print(__doc__)
