"""A local program in segments: what runs between two collectives, what is computed again, what is kept."""
