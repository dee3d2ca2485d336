"""Batches in parts: copies that overlap, accumulation, micro batches."""
