"""Calibration: the device profile of this machine, measured."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import WorldError
from msrun.runtime import world
from msrun.runtime.cost.devices import PROFILES, DeviceProfile, Link, Point
from msrun.runtime.cost.operators import measured_collective_seconds
from msrun.runtime.simulate.measured_times import (
    measure_fsdp_s,
    measure_operators,
    measure_overhead_s,
    measure_wait_s,
    sample_step,
)
from ranktable.files import write_whole

MATRIX, COPIED_BYTES, TINY = 768, 64 * 2**20, 4
SIZES = (2**10, 2**16, 2**20, 2**23)
"""Bytes of the messages that are measured."""
MESSAGES = 20
"""Of each size between two ranks."""
_TYPES = (torch.float32, torch.float64, torch.bfloat16)


def calibrate(
    path: str | os.PathLike[str] | None = None,
    *,
    name: str = "measured",
    step: Callable[[], object] | None = None,
) -> DeviceProfile:
    """Measure what this rank's processor and the links between the ranks of this host do, all ranks at once.

    All ranks call it together, after `init()`: they share cores and memory as they do in training. Alone it measures
    one process, and takes the links of the profile `cpu`. It measures

    - matrix products of 768 x 768, a copy of 64 MB and an addition of 4 numbers, for the roofline: medians;
    - the operators of a training step of a small network with all usual kinds of layers, and those of `step`: each
      with its operations, bytes and mean seconds, while the step runs. Times are those of the slowest rank of a step,
      for whom the others wait;
    - what Python and autograd take for each operator;
    - collectives over all ranks of 1 KB to 8 MB: medians;
    - what a step waits for a message beside its own seconds: small programs with messages, and without, by turns;
      of torch's FSDP2 with what its Python takes.

    It takes a few seconds, and six times `step`.

    Args:
        path: rank 0 writes the profile there as JSON, for `msrun --sim_device PATH`.
        name: of the profile.
        step: your training step, without arguments. Give it for a time that is right for your own network: a dry run
            with other settings then scales what its operators have taken here. It is called six times, and trains.

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
        in_host=given.in_host,
        between_hosts=given.between_hosts,
        to_host=Link(launch_s, bandwidth / 2),
        devices_per_host=place.local_world_size,
        has_streams=False,
        overhead_s=_mean(measure_overhead_s()),
        operators=measure_operators([sample_step(), *([] if step is None else [step])]),
    )
    if place.world_size > 1:
        collectives = {operation: _collective_points(operation, place.world_size) for operation in _COLLECTIVES}
        collectives["send"] = _message_points(place.global_rank, place.world_size)
        profile = replace(profile, collectives=collectives, in_host=_link(collectives["all_reduce"]))
        message_s = partial(_message_s, profile)
        fsdp_s = _mean(measure_fsdp_s(message_s))
        wait_s = _mean(measure_wait_s(message_s))
        profile = replace(profile, wait_s=wait_s, fsdp_s=fsdp_s)
    if path is not None and place.global_rank == 0:
        try:
            write_whole(path, (json.dumps(profile.to_json(), indent=1) + "\n").encode())
        except OSError as error:
            raise WorldError(f"calibrate({os.fspath(path)!r}): cannot be written ({error.strerror})") from None
    return profile


def _message_s(profile: DeviceProfile, operation: str, nbytes: int) -> float:
    """Return how long a collective over all ranks takes back to back with others of its kind."""
    return measured_collective_seconds(operation, nbytes, dist.get_world_size(), profile.in_host, profile)


def _product_s(dtype: torch.dtype) -> float:
    left, right = (torch.rand(MATRIX, MATRIX).to(dtype) for _ in range(2))
    return _median_s(lambda: left @ right, 9)


def _link(points: Sequence[Point]) -> Link:
    """Return the link for which the model of an all-reduce gives the times that the smallest and the largest took."""
    (ranks, small, small_s), *_, (_, large, large_s) = points
    alpha_s = small_s / math.ceil(math.log2(ranks))
    passed = 2 * (ranks - 1) / ranks * (large - small) if ranks > 2 else large - small
    return Link(alpha_s, passed / max(large_s - small_s, 1e-9))


def _collective_points(operation: str, ranks: int) -> list[Point]:
    """Return (ranks, bytes of the input of one rank, seconds) of collectives over all ranks."""
    found: list[Point] = []
    for size in SIZES:
        part = torch.zeros(size // 4 // ranks)
        whole = torch.zeros(part.numel() * ranks)
        send, call = _COLLECTIVES[operation](part, whole)
        dist.barrier()
        found.append((ranks, send.nbytes, _mean(_median_s(call, 20))))
    return found


def _message_points(rank: int, ranks: int) -> list[Point]:
    """Return (2, bytes, seconds) of messages to the rank half the world away, from the send to the receiver's return.

    Both ranks compute before and after they send. So where ranks share cores a message waits for its receiver to get
    one, which takes far longer than the way itself. All clocks are the host's one.
    """
    half = ranks // 2
    found: list[Point] = []
    for size in SIZES:
        took: list[float] = []
        value = torch.zeros(size // 8, dtype=torch.float64)
        dist.barrier()
        for number in range(MESSAGES if rank < 2 * half else 0):
            _compute()
            if (rank < half) == (number % 2 == 0):
                value[0] = time.perf_counter()
                sent = dist.isend(value, (rank + half) % (2 * half))
                _compute()
                sent.wait()  # type: ignore[union-attr]  # this rank is a member of the group
            else:
                dist.recv(value, (rank + half) % (2 * half))
                took.append(time.perf_counter() - float(value[0]))
        total = torch.tensor([sum(took), float(len(took))], dtype=torch.float64)
        dist.all_reduce(total)
        found.append((2, size, float(total[0] / total[1])))
    return found


def _compute() -> None:
    """Take a millisecond of this rank's processor."""
    matrix, begin = torch.ones(64, 64), time.thread_time()
    while time.thread_time() - begin < 1e-3:
        matrix @ matrix


_COLLECTIVES: Mapping[str, Callable[[Tensor, Tensor], tuple[Tensor, Callable[[], object]]]] = {
    "all_reduce": lambda _, whole: (whole, lambda: dist.all_reduce(whole)),
    "all_gather": lambda part, whole: (part, lambda: dist.all_gather_into_tensor(whole, part)),
    "reduce_scatter": lambda part, whole: (whole, lambda: dist.reduce_scatter_tensor(part, whole)),
    "all_to_all": lambda _, whole: (whole, lambda: dist.all_to_all_single(torch.empty_like(whole), whole)),
    "broadcast": lambda _, whole: (whole, lambda: dist.broadcast(whole, 0)),
}
"""operation -> from a part of one rank and a whole: its input, and how it is called"""


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
