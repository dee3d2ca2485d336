"""How parameters are stored on the ranks, and which of them travel together."""
