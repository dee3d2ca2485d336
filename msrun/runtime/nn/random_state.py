"""The random generators of one process, as plain values that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from msrun.runtime.world import device

State = dict[str, Any]


def take_random_state() -> State:
    """Return the states of torch's generator, that of this rank's device, Python's and numpy's global ones."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state: State = {
        "torch": torch.get_rng_state(),
        "python": (version, np.asarray(words, np.uint32).tobytes(), gauss),
        "numpy": (name, np.asarray(keys, np.uint32).tobytes(), *rest),
    }
    if device().type != "cpu":
        state["device"] = torch.get_device_module(device()).get_rng_state(device())
    return state


def put_random_state(state: State) -> None:
    """Set the generators; one that the state does not know stays as it is."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    if "device" in state and device().type != "cpu":
        torch.get_device_module(device()).set_rng_state(state["device"], device())


def choose_random_state(states: Sequence[State], global_rank: int, world_size: int) -> State | None:
    """Return the state for a rank of a world of `world_size`, from those of the world that wrote the checkpoint.

    Each rank takes its own. In a world of another size every rank takes the one state that all had, and when they had
    different ones there is none to take: None.
    """
    if len(states) == world_size:
        return states[global_rank]
    first = states[0]["torch"]
    return states[0] if all(torch.equal(first, other["torch"]) for other in states[1:]) else None
