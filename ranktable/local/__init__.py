"""A table against the host that it is read on."""
