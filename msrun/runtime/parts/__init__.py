"""Parameters at rest: each rank's part of a cut tensor, how torch's functions treat it, its DTensor in state dicts."""
