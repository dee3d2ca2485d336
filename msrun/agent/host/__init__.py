"""What this host has: processors, limits, accelerators."""
