"""A job on a world of any size, looked at from one process: one record for each class of equal ranks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.capture.capture import without_collector
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.operators import measured_collective_seconds
from msrun.runtime.execute.phase import running_alone
from msrun.runtime.nn.random_calls import RandomCalls
from msrun.runtime.nn.random_stream import part_of_batch
from msrun.runtime.nn.replaced import replaced_for_now
from msrun.runtime.parallel.context import LayoutFiles
from msrun.runtime.parallel.gradients_in_backward import ArrivingGradients
from msrun.runtime.parallel.host_operators import moved_at_borders
from msrun.runtime.parallel.modes.data_parallel import Replicas
from msrun.runtime.parallel.modes.own_gradients import has_own_gradient
from msrun.runtime.parallel.modes.reduction import ReducedNetwork
from msrun.runtime.parallel.modes.replica_plan import build_lone_plan
from msrun.runtime.parallel.outside import is_short
from msrun.runtime.parallel.parameters.fusion import BUCKET_BYTES, MB
from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall
from msrun.runtime.parallel.pipeline.schedule import Cell, time_actions
from msrun.runtime.parallel.plan import ParallelPlan
from msrun.runtime.parallel.precision import autocast
from msrun.runtime.parallel.recomputation import checkpointed
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.collective_messages import Message, Totals
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.simulate.recording import BACKWARD, MESSAGES, Recording
from msrun.runtime.simulate.step import (
    Sketch,
    StepRecord,
    fake_batch,
    finish_record,
    record_step,
    run_backward,
    sketch_call,
)
from msrun.runtime.tensors.plain_tensors import local_part

FIRST_BUCKET_BYTES = MB
"""The first of DDP's buckets is small, so that sending begins early; the others have `BUCKET_BYTES`."""


class _FakeReplicas(Replicas):
    """The modes' own code without the exchange of values; gradients are reduced as torch's DDP does it."""

    def __init__(self, settings: ParallelSettings, recording: Recording | None = None) -> None:
        super().__init__(settings, LayoutFiles(), ArrivingGradients())
        self.recording = recording
        self._buckets: _Buckets | None = None

    def tell(self, root: nn.Module, plan: ParallelPlan) -> None:  # noqa: ARG002
        """Keep the plan to itself."""
        ranks, hsdp = world.get_group_size(), self.settings.hsdp
        size = ranks if hsdp is None or hsdp.shard_size == -1 else min(hsdp.shard_size, ranks)
        self.plan = replace(plan, mesh=(ranks,) if size == ranks else (ranks // size, size))

    def _agree(self, _root: nn.Module) -> list[str]:
        return []

    def _check_written(self, _root: nn.Module, _versions: Mapping[nn.Parameter, int]) -> None:
        """No rank has values to compare."""

    def _reduction_of(self, network: nn.Module) -> ReducedNetwork:
        return _FakeReduction(network, self._collect)

    def _collect(self, network: nn.Module) -> None:
        assert self.recording is not None
        parameters = [p for p in network.parameters() if p.requires_grad and not has_own_gradient(p)]
        self._buckets = _Buckets(parameters, self.recording, is_wide=self.settings.gradient_fp32_sync)

    def finish_gradients(self) -> None:
        """Wait for the gradients of a module, or reduce those of a function, after its backward pass."""
        if self._buckets is not None:
            self._buckets.finish()
        elif not self.reduces_in_backward:
            parameters = [p for p in self.parameters() if p.grad is not None]
            reduced = self.reduce(parameters, [p.grad for p in parameters if p.grad is not None])
            for parameter, gradient in zip(parameters, reduced, strict=True):
                parameter.grad = gradient


class _FakeReduction(ReducedNetwork):
    """A module whose gradients are collected once it has run."""

    def __init__(self, network: nn.Module, collect: Callable[[nn.Module], None]) -> None:
        self._network = network
        self._collect: Callable[[nn.Module], None] | None = collect

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self._network(*args, **kwargs)

    def look(self, results: Sequence[Tensor]) -> None:  # noqa: ARG002
        """Collect the gradients from now on."""
        if self._collect is not None:
            self._collect(self._network)
        self._collect = None

    def begin_backward(self, *, syncs: bool) -> None:
        """Leave the pass alone."""


class _Buckets:
    """Gradients on their way, as torch's DDP sends them from its second step on: copied into buckets in the order in
    which they arrive, each all-reduced when it is full. DDP itself reads values to agree on that order.

    Args:
        is_wide: gradients of 16 bits travel as float32.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], recording: Recording, *, is_wide: bool) -> None:
        self._is_wide = is_wide
        elements: dict[torch.dtype, int] = {}
        for parameter in parameters:
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self._flat = {dtype: torch.empty(count, dtype=dtype) for dtype, count in elements.items()}
        recording.kind_of(list(self._flat.values()), MESSAGES)
        self._open: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in elements}
        self._filled = dict.fromkeys(elements, 0)
        self._parts: list[tuple[nn.Parameter, Tensor]] = []
        self._sent = 0

    def _arrived(self, parameter: nn.Parameter) -> None:
        begin, dtype = self._filled[parameter.dtype], parameter.dtype
        part = self._flat[dtype][begin : begin + parameter.numel()]
        self._filled[dtype] += parameter.numel()
        assert parameter.grad is not None
        torch.mul(parameter.grad.reshape(-1), 1 / dist.get_world_size(), out=part)
        self._parts.append((parameter, part))
        self._open[dtype].append(part)
        limit = BUCKET_BYTES if self._sent else FIRST_BUCKET_BYTES
        if sum(each.nbytes for each in self._open[dtype]) >= limit:
            self._send(dtype)

    def _send(self, dtype: torch.dtype) -> None:
        parts, self._open[dtype] = self._open[dtype], []
        if parts:
            end = self._filled[dtype]
            bucket = self._flat[dtype][end - sum(part.numel() for part in parts) : end]
            dist.all_reduce(bucket.float() if self._is_wide and is_short(dtype) else bucket, async_op=True)
            self._sent += 1

    def finish(self) -> None:
        """Send what is left, and give the parameters their gradients."""
        for dtype in self._open:
            self._send(dtype)
        for parameter, part in self._parts:
            assert parameter.grad is not None
            parameter.grad.copy_(part.view(parameter.shape))


def record_uncaptured(asked: Asked, mode: FakeTensorMode) -> tuple[ParallelPlan, StepRecord | None]:
    """Run a training step of a mode without capture, and return its plan and what was seen; at level 0 the plan alone.

    The gathers of FSDP2 are taken not to hide behind operators: it waits for them where it uses them. Its sums of
    gradients have a stream of their own on devices that have streams.
    """
    settings, level = asked.settings, asked.level
    with _without_values(asked.target, mode) as faked:
        replicas = None
        if settings.is_replicated:
            replicas = _FakeReplicas(settings)
            replicas.place(faked, (), {})
            plan = replicas.explain(None)
        else:
            plan = build_lone_plan(faked.root, settings)
        if not level:
            return plan, None
        with mode, _explained(settings.parallel_mode):
            recording = _record(faked, asked, replicas)
        parameters = dict(faked.root.named_parameters())
    return plan, finish_record(recording, parameters, asked.target.root, _count(recording))


def changes_network(target: Target, settings: ParallelSettings) -> bool:
    """Return whether looking at a call leaves the user's modules under FSDP2: those of a function cannot be copied."""
    uses_fsdp = settings.hsdp is not None and settings.is_replicated
    return uses_fsdp and target.call is not target.root


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        raise StrategyError(
            f"parallel_mode={what!r}: this step needs values, which a dry run does not have "
            f"({str(error).splitlines()[0][:120]}); use --sim_level 0"
        ) from error


def _record(faked: Target, asked: Asked, replicas: _FakeReplicas | None) -> Recording:
    settings, device = asked.settings, asked.device
    args, kwargs = pytree.tree_map_only(Tensor, torch.empty_like, (tuple(asked.args), dict(asked.kwargs)))
    batch = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [*map(local_part, faked.root.parameters()), *faked.root.buffers(), *batch]
    beside = ("reduce_scatter", "all_reduce") if device.has_streams else ()
    recording = Recording(device, there, beside, 0.0 if settings.hsdp is None else device.fsdp_s)
    if replicas is not None:
        replicas.recording = recording
    with recording.recording(), RandomCalls(), checkpointed(faked.root):
        result = _call(faked, settings, args, kwargs, replicas)
        run_backward(pytree.tree_leaves(result), recording)
        recording.finish()
        if replicas is not None and torch.is_grad_enabled():
            with recording.during(BACKWARD):
                replicas.finish_gradients()
            recording.finish()
    return recording


def _call(
    faked: Target,
    settings: ParallelSettings,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    replicas: _FakeReplicas | None,
) -> Any:
    if replicas is None:
        with autocast(settings.precision), moved_at_borders(faked.root), running_alone():
            return faked.call(*args, **kwargs)
    with part_of_batch(world.get_rank(), world.get_group_size(), pytree.tree_leaves((args, kwargs))):
        return replicas.call(faked, args, kwargs)


def _count(recording: Recording) -> Totals:
    """Return the messages of a recording by operation."""
    return Totals.of(Message(span.name, span.nbytes, len(span.ranks)) for span in recording.spans if span.is_message)


@contextmanager
def _without_values(target: Target, mode: FakeTensorMode) -> Iterator[Target]:
    """Give a target whose parameters and buffers have no values."""
    fakes = {id(parameter): _fake_parameter(parameter, mode) for parameter in target.root.parameters()}
    if target.call is not target.root:
        with replaced_for_now(target.root, fakes):
            yield target
        return
    memo: dict[int, Any] = dict(fakes)
    memo.update({id(buffer): mode.from_tensor(buffer) for buffer in target.root.buffers()})
    root = copy.deepcopy(target.root, memo)
    yield Target(root, root)


def _fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    with mode:
        empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
        fake = nn.Parameter(empty, parameter.requires_grad)
    vars(fake).update(vars(parameter))  # the user's marks
    return fake


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


@dataclass(frozen=True)
class Asked:
    """A training step that is looked at."""

    target: Target
    settings: ParallelSettings
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    device: DeviceProfile
    level: int
    """0: what is decided; 1: also memory; 2 and up: also time."""
    own_rank: int
    """The rank of its stage that is looked at; ranks of other stages are those of equal place."""


def simulate_job(asked: Asked) -> SimulatedJob:
    """Look at a training step of a network, without placing or computing anything."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if not asked.settings.is_captured:
        return _simulate_uncaptured(asked, mode)
    with without_collector():
        return _simulate_captured(asked, mode)


def _simulate_captured(asked: Asked, mode: FakeTensorMode) -> SimulatedJob:
    args, kwargs, device = asked.args, asked.kwargs, asked.device
    sketches = sketch_call(asked.target, asked.settings, args, kwargs, mode, asked.own_rank)
    classes = []
    for sketch in sketches:
        world.stand_for(sketch.rank)
        record = None
        if asked.level:
            record = record_step(sketch, fake_batch(args, kwargs, mode), mode, device, asked.target.root)
        own = () if sketch.call.whole is not None else tuple(sketch.call.own)
        classes.append(RankClass(sketch.ranks, sketch.rank, own, sketch.plan, record))
    step = _time(sketches, classes, device) if asked.level > 1 else None
    return SimulatedJob(device, world.get_group_size(), tuple(classes), step)


def _simulate_uncaptured(asked: Asked, mode: FakeTensorMode) -> SimulatedJob:
    world.stand_for(asked.own_rank)
    ranks = world.get_group_size()
    plan, record = record_uncaptured(asked, mode)
    if record is not None:
        plan = replace(plan, traffic=record.traffic)
    step = None
    if record is not None and asked.level > 1:
        messages_s = record.recording.seconds(messages=True)
        step = StepTime(record.step_s, record.compute_s, messages_s, max(0.0, record.step_s - record.compute_s), None)
    return SimulatedJob(asked.device, ranks, (RankClass(range(ranks), asked.own_rank, (), plan, record),), step)


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
