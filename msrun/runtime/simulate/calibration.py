"""Calibration: the device profile of this machine, measured."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from msrun.errors import WorldError
from msrun.runtime import world
from msrun.runtime.cost.devices import PROFILES, DeviceProfile, Link

MATRIX, COPIED_BYTES, TINY = 768, 64 * 2**20, 4
SMALL_BYTES, LARGE_BYTES = 1024, 8 * 2**20
_TYPES = (torch.float32, torch.float64, torch.bfloat16)


def calibrate(path: str | os.PathLike[str] | None = None, *, name: str = "measured") -> DeviceProfile:
    """Measure what this rank's processor and the links between the ranks of this host do, all ranks at once.

    All ranks call it together, after `init()`: they share cores and memory as they do in training. Alone it measures
    one process, and takes the links of the profile `cpu`. Every figure is a median; matrix products of 768 x 768, a
    copy of 64 MB, an addition of 4 numbers, and all-reduces of 1 KB and 8 MB over all ranks, from which latency and
    bandwidth follow by the formulas of `msrun.runtime.cost.collectives`. It takes about two seconds.

    Args:
        path: rank 0 writes the profile there as JSON, for `msrun --sim_device PATH`.
        name: of the profile.

    Returns:
        The profile; the mean over the ranks. Links between hosts are those of the profile `cpu`.

    Raises:
        WorldError: ranks on several hosts, on a device other than the CPU, or the file cannot be written.
    """
    place = world.world()
    if place.local_world_size != place.world_size or world.device().type != "cpu":
        raise WorldError(
            f"calibrate() with {place.world_size} ranks on {world.device().type}: it measures the ranks of one host on "
            "the CPU; start it with msrun on one host"
        )
    flops = {str(dtype).removeprefix("torch."): _mean(2.0 * MATRIX**3 / _product_s(dtype)) for dtype in _TYPES}
    source, target = (torch.zeros(COPIED_BYTES // 4) for _ in range(2))
    bandwidth = _mean(2.0 * COPIED_BYTES / _median_s(lambda: target.copy_(source), 10))
    tiny = torch.zeros(TINY)
    launch_s = _mean(_median_s(lambda: tiny + tiny, 2000))
    given = PROFILES["cpu"]
    profile = DeviceProfile(
        name,
        flops,
        bandwidth,
        _memory_bytes() // place.local_world_size,
        launch_s,
        in_host=_link(place.world_size) if place.world_size > 1 else given.in_host,
        between_hosts=given.between_hosts,
        to_host=Link(launch_s, bandwidth / 2),
        devices_per_host=place.local_world_size,
    )
    if path is not None and place.global_rank == 0:
        try:
            Path(path).write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise WorldError(f"calibrate({os.fspath(path)!r}): cannot be written ({error.strerror})") from None
    return profile


def _product_s(dtype: torch.dtype) -> float:
    left, right = (torch.rand(MATRIX, MATRIX).to(dtype) for _ in range(2))
    return _median_s(lambda: left @ right, 9)


def _link(ranks: int) -> Link:
    """Return the link for which the model of an all-reduce gives the times that it takes here."""
    small_s, large_s = (_mean(_all_reduce_s(nbytes)) for nbytes in (SMALL_BYTES, LARGE_BYTES))
    alpha_s = small_s / math.ceil(math.log2(ranks))
    passed = 2 * (ranks - 1) / ranks * LARGE_BYTES if ranks > 2 else LARGE_BYTES
    return Link(alpha_s, passed / max(large_s - small_s, 1e-9))


def _all_reduce_s(nbytes: int) -> float:
    value = torch.zeros(nbytes // 4)
    return _median_s(lambda: dist.all_reduce(value), 20)


def _median_s(call: Callable[[], object], times: int) -> float:
    """Return how long a call takes, after two that do not count."""
    found = []
    for number in range(times + 2):
        begin = time.perf_counter()
        call()
        if number > 1:
            found.append(time.perf_counter() - begin)
    return statistics.median(found)


def _mean(value: float) -> float:
    """Return the mean of a figure over the ranks."""
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
