"""Operator rules: which strategies an operator allows, and how its local part is computed."""
