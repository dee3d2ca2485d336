"""Hosts over SSH: the system's ssh as a child, or paramiko where there is none."""
