"""How a process finds its world and meets the others, whoever started it."""
