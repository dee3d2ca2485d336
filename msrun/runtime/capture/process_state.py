"""What a capture leaves as it was: the settings and random streams of the process, whether it went well or not."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch

from msrun.errors import CaptureError

_KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "Python's random numbers": (random.getstate, random.setstate),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
}
"""What a network may change in one process, in every call, and cannot where its Python code does not run again."""
_RESTORED: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
)
_STACKS: tuple[tuple[Callable[[], int], Callable[[], Any]], ...] = (
    (lambda: len(torch._C._functorch.get_interpreter_stack() or ()), torch._C._functorch.pop_dynamic_layer_stack),
    (torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack),
    (torch._C._len_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack),
)
"""How many contexts are entered, and how the innermost one is left."""


@contextlib.contextmanager
def unchanged_process(devices: Collection[str]) -> Iterator[None]:
    """Give the process back the settings and random streams that it had, also when a capture fails halfway.

    Args:
        devices: kinds of devices whose autocast the network may switch.

    Raises:
        CaptureError: a capture that went well has changed one.
    """
    kept = {name: read() for name, (read, _) in _KEPT.items()}
    restored = [read() for read, _ in _RESTORED]
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    depths = [depth() for depth, _ in _STACKS]
    changed: list[str] = []
    try:
        yield
        changed += [name for name, (read, _) in _KEPT.items() if read() != kept[name]]
    finally:
        for (depth, leave), before in zip(_STACKS, depths, strict=True):
            for _ in range(depth() - before):
                leave()
        for name, (_, write) in _KEPT.items():
            write(kept[name])
        for (_, write), value in zip(_RESTORED, restored, strict=True):
            write(value)
        for device, is_on, dtype in autocast:
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
    if changed:
        raise CaptureError(
            f"the network changes {changed[0]} in its forward pass, which a captured graph does not do again in each "
            "call: do that outside the network, "
            'or use parallel_mode="data_parallel", which needs no capture, where the loss is a mean over rows'
        )
