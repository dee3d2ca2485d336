"""Embedding tables: looked up by rows, on the host, over the ranks, with gradients of rows alone."""
