"""What a checkpoint calls its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msrun.runtime.world import world

if TYPE_CHECKING:
    from msrun.runtime.parallel.parameters.network_state import NetworkState

NETWORK = "model"
OPTIMIZER = "optimizer"
TensorKey = tuple[str, ...]
"""(NETWORK, name) or (OPTIMIZER, parameter name, key): the path that torch's tools give a tensor in a nested dict.
What belongs to one rank alone has `rank_N` before it."""


def flat_name(key: TensorKey) -> str:
    """Return a tensor's name in the files."""
    return ".".join(key)


def read_key(given: Any) -> TensorKey:
    """Return the key that a file gives.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(given, list | tuple) or len(given) < 2 or not all(isinstance(part, str) for part in given):
        raise ValueError("a tensor's key must be a list of two names or more")
    return tuple(given)


def own_key(key: TensorKey, global_rank: int) -> TensorKey:
    """Return the key of a tensor that belongs to one rank alone: a parameter cut by hand, and its optimizer state."""
    return (f"rank_{global_rank}", *key)


def key_of(state: NetworkState, name: str, *more: str) -> TensorKey:
    """Return where a checkpoint has a tensor of a network, or with `more` the optimizer's state of it."""
    key = (OPTIMIZER if more else NETWORK, name, *more)
    return own_key(key, world().global_rank) if name in state.own else key
