"""A training step compared with the same step of one process: the net below capture, partition and every rule."""
