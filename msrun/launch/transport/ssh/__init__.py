"""Hosts over SSH: the system's ssh as a child."""
