"""How tensors are cut over the ranks: layouts, strategies, redistribution, and one rule for each operator."""
