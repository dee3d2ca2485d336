"""Checks of this host before anything starts."""
