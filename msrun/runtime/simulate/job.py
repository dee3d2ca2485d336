"""A job on a world of any size, looked at from one process: one record for each class of equal ranks."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch._subclasses.fake_tensor import FakeTensorMode

from msrun.runtime import world
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.operators import measured_collective_seconds
from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall
from msrun.runtime.parallel.pipeline.schedule import Cell, time_actions
from msrun.runtime.parallel.plan import ParallelPlan
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.simulate.sketch import Sketch, fake_batch, sketch_call
from msrun.runtime.simulate.step import StepRecord, record_step
from msrun.runtime.simulate.uncaptured import record_uncaptured

MOST_ROWS = 16
"""Of the matrix: more hosts are taken together."""
Ranks = npt.NDArray[np.int64]
_IN_RING = {
    "all_gather": lambda count: count - 1.0,
    "reduce_scatter": lambda count: (count - 1) / count,
    "all_reduce": lambda count: 2 * (count - 1) / count,
    "broadcast": lambda count: 2 * (count - 1) / count,
}
"""What a rank hands on in a ring, in units of its input."""


@dataclass(frozen=True)
class HostTraffic:
    """Bytes that hosts send each other."""

    nbytes: npt.NDArray[np.float64]
    """(rows, rows): from, to; the diagonal stays in the hosts"""
    hosts_per_row: int


def count_host_traffic(job: SimulatedJob, local_worker_num: int) -> HostTraffic:
    """Return what goes from host to host in one step; ranks fill the hosts one after the other.

    A ring of p ranks hands (p - 1) parts of a gather or a reduce-scatter on, and twice as many parts of an all-reduce
    or a broadcast, each a p-th of the whole; in an all-to-all each rank sends every other one a p-th of its input.
    """
    hosts = -(-job.world_size // local_worker_num)
    per_row = -(-hosts // MOST_ROWS)
    found = np.zeros((-(-hosts // per_row),) * 2)
    row_of: Ranks = np.arange(job.world_size) // local_worker_num // per_row
    for alike in job.classes:
        moved: Counter[tuple[str, Sequence[int]]] = Counter()
        for span in alike.record.recording.spans if alike.record is not None else ():
            if span.is_message and span.name != "receive":
                moved[span.name, span.ranks] += span.nbytes
        for (operation, ranks), nbytes in moved.items():
            if len(ranks) > 1:
                _add(found, row_of, alike, operation, ranks, nbytes)
    return HostTraffic(found, per_row)


def _add(
    found: npt.NDArray[np.float64], row_of: Ranks, alike: RankClass, operation: str, ranks: Sequence[int], nbytes: int
) -> None:
    """Add one kind of message for every rank of a class: the groups of the others are shifted copies of this one."""
    senders: Ranks = np.arange(alike.ranks.start, alike.ranks.stop)
    count, place = len(ranks), ranks.index(alike.rank)
    if ranks[0] not in alike.ranks or ranks[-1] not in alike.ranks:  # between stages
        step = ranks[(place + 1) % count] - alike.rank
        sent = nbytes if operation == "send" else nbytes * _IN_RING[operation](count)
        np.add.at(found, (row_of[senders], row_of[senders + step]), sent)
        return
    offsets: Ranks = np.asarray(ranks) - min(ranks)
    own = _offset_in_group(alike, senders, set(offsets.tolist()))
    if operation == "all_to_all":
        groups = np.unique(senders - own, return_inverse=True)[1]
        members = np.zeros((groups.max() + 1, len(found)))
        np.add.at(members, (groups, row_of[senders]), 1)
        pairs = members.T @ members - np.diag(members.sum(axis=0))  # nobody sends to itself
        found += pairs * nbytes / count
        return
    order = np.argsort(offsets)
    index = order[np.searchsorted(offsets[order], own)]
    receivers = senders - own + offsets[(index + 1) % count]
    np.add.at(found, (row_of[senders], row_of[receivers]), nbytes * _IN_RING[operation](count))


def _offset_in_group(alike: RankClass, senders: Ranks, offsets: set[int]) -> Ranks:
    """Return how far every rank is from the first one of its group: the mesh axes of the group are those at whose
    stride it has a member."""
    mesh = Mesh(alike.plan.mesh, alike.ranks.start)
    total: Ranks = np.zeros_like(senders)
    for axis in mesh.axes:
        stride = mesh.stride(axis)
        if stride in offsets:
            total += (senders - mesh.first_rank) // stride % mesh.shape[axis] * stride
    return total


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same."""

    ranks: range
    rank: int
    """The one that was looked at."""
    stages: tuple[int, ...]
    """Of a pipeline."""
    plan: ParallelPlan
    record: StepRecord | None
    """None at level 0."""


@dataclass(frozen=True)
class StepTime:
    """How long a training step of the job takes."""

    seconds: float
    compute_s: float
    """Of operators, on the class of ranks that computes longest."""
    messages_s: float
    """Of messages of that class, those between stages left out."""
    waits_s: float
    """How long it waits for them: what is not hidden behind operators."""
    bubble: float | None
    """Share of the step in which a rank of a pipeline waits for other stages, mean over the stages."""
    timeline: tuple[tuple[Cell, ...], ...] = ()
    """Of a pipeline: a row for each stage of ranks."""

    @property
    def overlap(self) -> float | None:
        """Share of the messages' time that is hidden behind operators; None without messages."""
        return None if not self.messages_s else max(0.0, 1 - self.waits_s / self.messages_s)


@dataclass(frozen=True)
class SimulatedJob:
    """What was found out about a job."""

    device: DeviceProfile
    world_size: int
    classes: tuple[RankClass, ...]
    step: StepTime | None
    """None below level 2."""

    @property
    def plan(self) -> ParallelPlan:
        """What was decided, as the first class of ranks sees it."""
        return self.classes[0].plan

    @property
    def peak_bytes(self) -> int:
        """Memory of the fullest rank."""
        return max(found.record.peak_bytes for found in self.classes if found.record is not None)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room on its device."""
        return self.peak_bytes <= self.device.memory_bytes


def simulate_job(
    target: Target,
    settings: ParallelSettings,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: DeviceProfile,
    level: int,
    own_rank: int,
) -> SimulatedJob:
    """Look at a training step of a network on these arguments, without placing or computing anything.

    Args:
        level: 0: what is decided; 1: also memory; 2 and up: also time.
        own_rank: the rank of its stage that is looked at; ranks of other stages are those of equal place.

    Raises:
        StrategyError: an illegal strategy, schedule or assignment of stages, or a step that needs values.
        CaptureError: the network cannot be captured.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if not settings.is_captured:
        return _simulate_uncaptured(target, settings, args, kwargs, mode, device, level, own_rank)
    with _without_collector():
        return _simulate_captured(target, settings, args, kwargs, mode, device, level, own_rank)


def _simulate_captured(
    target: Target,
    settings: ParallelSettings,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    device: DeviceProfile,
    level: int,
    own_rank: int,
) -> SimulatedJob:
    sketches = sketch_call(target, settings, args, kwargs, mode, own_rank)
    classes = []
    for sketch in sketches:
        world.stand_for(sketch.rank)
        record = None
        if level:
            record = record_step(sketch, fake_batch(args, kwargs, mode), mode, device, target.root)
        own = () if sketch.call.whole is not None else tuple(sketch.call.own)
        classes.append(RankClass(sketch.ranks, sketch.rank, own, sketch.plan, record))
    step = _time(sketches, classes, device) if level > 1 else None
    return SimulatedJob(device, world.get_group_size(), tuple(classes), step)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Let no cycles be looked for meanwhile: a large graph would be walked again and again, and all of it stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _simulate_uncaptured(
    target: Target,
    settings: ParallelSettings,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    device: DeviceProfile,
    level: int,
    own_rank: int,
) -> SimulatedJob:
    world.stand_for(own_rank)
    ranks = world.get_group_size()
    plan, record = record_uncaptured(target, settings, args, kwargs, mode, device, level)
    if record is not None:
        plan = replace(plan, traffic=record.traffic)
    step = None
    if record is not None and level > 1:
        messages_s = record.recording.seconds(messages=True)
        step = StepTime(record.step_s, record.compute_s, messages_s, max(0.0, record.step_s - record.compute_s), None)
    return SimulatedJob(device, ranks, (RankClass(range(ranks), own_rank, (), plan, record),), step)


def _time(sketches: Sequence[Sketch], classes: Sequence[RankClass], device: DeviceProfile) -> StepTime:
    records = [found.record for found in classes if found.record is not None]
    longest = max(records, key=lambda record: record.compute_s)
    messages_s = longest.recording.seconds(messages=True)
    waits_s = max(0.0, longest.step_s - longest.compute_s)
    call = sketches[0].call
    if not isinstance(call, PipelinedCall):
        return StepTime(longest.step_s, longest.compute_s, messages_s, waits_s, None)
    actions = {key: seconds for record in records for key, seconds in record.actions_s.items()}
    rows = time_actions(call.schedule, lambda a: actions[a.stage, a.kind], _seconds_between_stages(sketches, device))
    seconds = max(row[-1].end + record.rest_s for row, record in zip(rows, records, strict=True))
    busy_s = sum(cell.end - cell.begin for row in rows for cell in row) + sum(record.rest_s for record in records)
    return StepTime(seconds, longest.compute_s, messages_s, waits_s, max(0.0, 1 - busy_s / (len(rows) * seconds)), rows)


def _seconds_between_stages(sketches: Sequence[Sketch], device: DeviceProfile) -> float:
    """Return how long the largest message between two stages takes."""
    call = sketches[0].call
    assert isinstance(call, PipelinedCall)
    nbytes = [value.value.nbytes * call.copies for stage in call.stages for value in stage.sent]
    is_inside = sketches[-1].ranks[-1] < device.devices_per_host
    link = device.in_host if is_inside else device.between_hosts
    return measured_collective_seconds("send", max(nbytes, default=0), 2, link, device)
