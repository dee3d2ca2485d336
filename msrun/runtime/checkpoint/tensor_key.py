"""What a checkpoint calls its tensors."""

from __future__ import annotations

NETWORK = "model"
OPTIMIZER = "optimizer"
TensorKey = tuple[str, ...]
"""(NETWORK, name) or (OPTIMIZER, parameter name, key): the path that torch's tools give a tensor in a nested dict.
What belongs to one rank alone has `rank_N` before it."""


def flat_name(key: TensorKey) -> str:
    """Return a tensor's name in the files."""
    return ".".join(key)


def own_key(key: TensorKey, global_rank: int) -> TensorKey:
    """Return the key of a tensor that belongs to one rank alone: a parameter cut by hand, and its optimizer state."""
    return (f"rank_{global_rank}", *key)
