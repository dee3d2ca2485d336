"""Hosts as users write them, for ranktable and for msrun alike: lists, host files, and which of them this host is."""
