"""Settings of a process, in MindSpore's words: set_context, and the context of parallel training."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from msrun import contract
from msrun.errors import UsageError, near_miss
from msrun.runtime import world
from msrun.runtime.parallel.context import (
    ParallelMode,
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)
from msrun.runtime.server.context import get_ps_context, reset_ps_context, set_ps_context

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "ParallelMode",
    "get_auto_parallel_context",
    "get_context",
    "get_ps_context",
    "reset_auto_parallel_context",
    "reset_ps_context",
    "set_auto_parallel_context",
    "set_context",
    "set_ps_context",
]

GRAPH_MODE = 0
PYNATIVE_MODE = 1
TARGETS = {"Ascend": "npu", "GPU": "cuda", "CPU": "cpu"}
"""MindSpore's name of a device -> torch's."""
_DEFAULTS: dict[str, Any] = {"mode": GRAPH_MODE, "device_target": None, "device_id": None}
_chosen: dict[str, Any] = {}
_log = logging.getLogger("msrun.runtime")


def set_context(**words: Any) -> None:
    """Say where this process computes. Called before `init()`.

    Args:
        words: `mode`, GRAPH_MODE or PYNATIVE_MODE: both run alike, because AutoParallel captures what it needs.
            `device_target`, "Ascend", "GPU" or "CPU": where this host has no such device, a warning says which one is
            taken. `device_id`: index of this process's device on its host; under a launcher it is the one assigned.

    Raises:
        UsageError: an unknown word, a value out of its range, or another device than the one assigned.
    """
    for word in words:
        if word not in _DEFAULTS:
            raise UsageError(
                f"set_context({word}=...): unknown word{near_miss(word, _DEFAULTS)}; known are {', '.join(_DEFAULTS)}, "
                "others are of MindSpore's compiler and are left out"
            )
    if words.get("mode", GRAPH_MODE) not in (GRAPH_MODE, PYNATIVE_MODE):
        raise UsageError(f"set_context(mode={words['mode']!r}): GRAPH_MODE or PYNATIVE_MODE")
    if "device_target" in words:
        _choose_target(words["device_target"])
    if "device_id" in words:
        _choose_device(words["device_id"])
    _chosen.update(words)


def get_context(name: str) -> Any:
    """Return what was set for a word, or what is done when nothing was.

    Raises:
        UsageError: an unknown word.
    """
    if name not in _DEFAULTS:
        raise UsageError(f"get_context({name!r}): unknown word{near_miss(name, _DEFAULTS)}")
    if name in _chosen:
        return _chosen[name]
    device = world.device()
    if name == "device_target":
        return next(target for target, kind in TARGETS.items() if kind == device.type)
    return device.index or 0 if name == "device_id" else _DEFAULTS[name]


def _choose_target(target: Any) -> None:
    if target not in TARGETS:
        raise UsageError(f"set_context(device_target={target!r}): one of {', '.join(TARGETS)}")
    kind = TARGETS[target]
    if world.is_initialized():
        found = world.device().type
    elif kind == "cuda":
        found = "cuda" if torch.cuda.is_available() else "cpu"
    elif kind == "npu":
        found = "npu" if hasattr(torch, "npu") and torch.npu.is_available() else "cpu"
    else:
        found = "cpu"
    if found != kind:
        _log.warning(f"set_context(device_target={target!r}): not here, this process computes on {found}")
    if not world.is_initialized():
        os.environ.setdefault(contract.MSRUN_DEVICE_TARGET, {"cuda": "gpu", "npu": "ascend", "cpu": "cpu"}[found])


def _choose_device(index: Any) -> None:
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise UsageError(f"set_context(device_id={index!r}): a whole number, 0 or more")
    if world.is_initialized() or contract.DEVICE_ID in os.environ:
        assigned = int(os.environ.get(contract.DEVICE_ID, world.get_local_rank()))
        if index != assigned and world.get_group_size() > 1:
            raise UsageError(
                f"set_context(device_id={index}): this process was assigned device {assigned}; leave the word out, or "
                "give int(os.environ['DEVICE_ID'])"
            )
    else:
        os.environ[contract.DEVICE_ID] = str(index)
