"""SearchSettings: what the user wants of a search of strategies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from msrun import contract
from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.cost.devices import DeviceProfile, find_profile
from msrun.runtime.search.search import AUTO, SEARCH_MODES, TIME_LIMIT_S, SearchSpec

RECURSIVE = "recursive_programming"
SEARCH_WORDS = {"auto_parallel": RECURSIVE, AUTO: AUTO} | {mode: mode for mode in SEARCH_MODES}
"""Word of `parallel_mode` -> how strategies are searched; AUTO_PARALLEL searches as MindSpore does by default."""
_PROFILE_OF_DEVICE = {"cpu": "cpu", "cuda": "a100", "npu": "ascend910b"}
_KNOWN_GPUS = ("h200", "h100", "a100")
"""Profiles that are found by the name that CUDA gives the device."""
MB = 2**20


@dataclass(frozen=True)
class SearchSettings:
    """What `AutoParallel.search` asks for.

    Raises:
        StrategyError: a value out of its range.
    """

    mode: str
    device: DeviceProfile | None = None
    """None: the profile of the device that this process computes on, in a dry run of the one that it stands for."""
    memory_limit_mb: float | None = None
    optimizer_states: int = 2
    time_limit_s: float = TIME_LIMIT_S

    def __post_init__(self) -> None:
        limit, states = self.memory_limit_mb, self.optimizer_states
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (is_number and limit > 0):
            raise StrategyError(f"search(memory_limit_mb={limit!r}): must be a number of MB above 0")
        if not isinstance(states, int) or isinstance(states, bool) or states < 0:
            raise StrategyError(f"search(optimizer_states={states!r}): must be a whole number, 0 or more")
        seconds = self.time_limit_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise StrategyError(f"search(time_limit_s={seconds!r}): must be a number of seconds above 0")

    def spec(self) -> SearchSpec:
        """Return what is searched for in this process."""
        device = self.device or own_profile()
        limit = None if self.memory_limit_mb is None else int(self.memory_limit_mb * MB)
        return SearchSpec(self.mode, device, limit, self.optimizer_states, self.time_limit_s)


def own_profile() -> DeviceProfile:
    """Return the profile of the device that this process computes on, or in a dry run stands for."""
    if contract.MSRUN_SIM_LEVEL in os.environ:
        return find_profile(os.environ.get(contract.MSRUN_SIM_DEVICE, "cpu"))
    kind = world.device().type
    name = torch.cuda.get_device_name(world.device()).lower() if kind == "cuda" else ""
    known = next((word for word in _KNOWN_GPUS if word in name), "")
    return find_profile(known or _PROFILE_OF_DEVICE.get(kind, "cpu"))


def check_search_mode(word: str, value: Any) -> str:
    """Return a way to search.

    Raises:
        StrategyError: an unknown one.
    """
    if value not in SEARCH_MODES and value != AUTO:
        known = ", ".join([*SEARCH_MODES, AUTO])
        raise StrategyError(f"{word}={value!r}: must be one of {known}")
    return str(value)


def profile_of(device: str | os.PathLike[str] | DeviceProfile | None) -> DeviceProfile | None:
    """Return the profile that a user names; None for None."""
    return None if device is None else find_profile(device)
