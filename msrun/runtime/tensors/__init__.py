"""Tensors as torch holds them: their plain memory, a value put in place of another, weights without values."""
