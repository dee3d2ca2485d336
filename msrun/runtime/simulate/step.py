"""One training step of a sketch on fake tensors: forward, backward, optimizer, recorded."""

from __future__ import annotations

import functools
import gc
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.execute.executor import Executor
from msrun.runtime.execute.placement import PlacedParameter, placement_of, placements
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.optim.host_steps import find_offload
from msrun.runtime.optim.host_weights import is_narrow, wide_type
from msrun.runtime.parallel.batch.parts import find_tensors
from msrun.runtime.parallel.compilation.compilation import Compilation
from msrun.runtime.parallel.compilation.compiled import ProgramCall
from msrun.runtime.parallel.parameters.storage import ParameterStorage, StageHolders
from msrun.runtime.parallel.pipeline.compilation import Division, draft_call
from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall, on_action
from msrun.runtime.parallel.pipeline.schedule import Action, Kind, build_pipeline_plan
from msrun.runtime.parallel.plan import ParallelPlan, with_traffic
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.collective_messages import Totals
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.layout import Mesh, build_mesh
from msrun.runtime.simulate.recording import ACTIVATIONS, BACKWARD, GRADIENTS, HOST, OPTIMIZER, RECOMPUTED, Recording
from msrun.runtime.tensors.plain_tensors import local_part


class SketchedStorage(ParameterStorage):
    """Decides how parameters are stored, and puts fake parts beside the user's own, which stay as they are."""

    def __init__(
        self, root: nn.Module, mesh: Mesh, rank: int, settings: ParallelSettings, mode: FakeTensorMode
    ) -> None:
        super().__init__(root, mesh, rank, settings.hsdp)
        self._mode = mode

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Stages of every parameter of a pipeline."""
        return {name: stages for name, stages in self._stages.holders.items() if stages}

    @property
    def _is_complete(self) -> bool:
        return bool(self.stored)

    def place(self, program: LocalProgram, stages: StageHolders | None = None) -> list[str]:
        """Make the parts; nothing is exchanged, and no memory taken."""
        self._stages = stages or self._stages
        self.stored = {name: self._with_part(item) for name, item in self._decide_all(program).items()}
        return []

    def _with_part(self, item: PlacedParameter) -> PlacedParameter:
        with self._mode:
            part = torch.empty(item.placement.local_shape, dtype=item.parameter.dtype)
        parameter = nn.Parameter(part, item.parameter.requires_grad)
        placements[parameter] = item.placement
        return replace(item, parameter=parameter)


@dataclass(frozen=True)
class Sketch:
    """What the ranks of one stage do in a step; of a network without stages, what all ranks do."""

    ranks: range
    """That are alike."""
    rank: int
    """The one that was looked at."""
    call: ProgramCall
    storage: SketchedStorage
    plan: ParallelPlan


def sketch_call(
    target: Target,
    settings: ParallelSettings,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    own_rank: int,
) -> list[Sketch]:
    """Return one sketch for each stage of ranks, in order; the dry run stands for the last of these ranks afterwards.

    Args:
        own_rank: of the user's choice; of other stages the rank of equal place is looked at.
    """
    size = settings.pipeline.ranks_per_stage(world.get_group_size())
    world.stand_for(own_rank)
    compilation = _compilation(target, settings, own_rank, size, mode)
    if settings.hsdp is not None:
        settings.hsdp.check_world(size)
    division = draft_call(compilation, compilation.find_wrappers(), args, kwargs)
    if not isinstance(division, Division):
        call, plan = division.build(compilation)
        assert isinstance(compilation.storage, SketchedStorage)
        return [Sketch(range(size), own_rank, call, compilation.storage, with_traffic(plan, call, own_rank))]
    notes = [*division.program.notes]
    sketches = []
    for stage in range(settings.pipeline.stages):
        rank = stage * size + own_rank % size
        world.stand_for(rank)
        of_stage = _compilation(target, settings, rank, size, mode)
        of_stage.mesh = of_stage.storage.use_mesh(replace(compilation.mesh, first_rank=stage * size), ())
        of_stage.layouts = compilation.layouts
        division.program.notes[:] = notes
        made, plan = division.build(of_stage)
        assert isinstance(of_stage.storage, SketchedStorage)
        sketches.append(Sketch(range(stage * size, (stage + 1) * size), rank, made, of_stage.storage, plan))
    traffic = [sketch.plan.traffic for sketch in sketches if sketch.plan.traffic is not None]
    return [_with_traffic(sketch, division, traffic) for sketch in sketches]


def _with_traffic(sketch: Sketch, division: Division, traffic: Sequence[Totals]) -> Sketch:
    """Return a sketch whose plan knows what all stages of ranks move."""
    assert isinstance(sketch.call, PipelinedCall)
    pipeline = build_pipeline_plan(sketch.call, division.assignment, traffic)
    return replace(sketch, plan=replace(sketch.plan, world_size=world.get_group_size(), pipeline=pipeline))


def _compilation(target: Target, settings: ParallelSettings, rank: int, size: int, mode: FakeTensorMode) -> Compilation:
    mesh = build_mesh(size, rank // size * size)
    return Compilation(target, settings, mesh, rank, SketchedStorage(target.root, mesh, rank, settings, mode))


def fake_batch(args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> list[Tensor]:
    """Return fake tensors like the user's."""
    return [mode.from_tensor(tensor) for tensor in find_tensors(args, kwargs)]


def placed_parts(sketch: Sketch) -> list[PlacedParameter]:
    """Return the parameters that a rank of a sketch holds, parts of other stages left out."""
    return [item for item in sketch.storage.stored.values() if item.placement.is_held]


@dataclass(frozen=True)
class StateBytes:
    """What an optimizer keeps from step to step."""

    total: int
    """Its state; of one that works on the host (`optim.offload`) with wide copies of weights of 16 bits."""
    on_host: int
    """Of these, those in the host's memory."""
    host_copies: int
    """Beside its state: copies that the host has of weights that are wide enough."""


def find_optimizers(root: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers that the script has made for parameters of a network."""
    own = {id(parameter) for parameter in root.parameters()}
    alive = [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]
    return [
        optimizer
        for optimizer in alive
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    ]


def step_optimizer(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, Tensor],
    root: nn.Module,
    recording: Recording,
    on_host: frozenset[str],
) -> StateBytes:
    """Step a stand-in of an optimizer, recorded, and return what it keeps.

    Args:
        trained: this rank's parts by name.
        on_host: names of those that lie on the host.
    """
    name_of = {id(parameter): name for name, parameter in root.named_parameters()}
    offload = find_offload(optimizer)
    chosen = offload.chosen(optimizer) if offload is not None else set()
    moved = on_host | {name for key, name in name_of.items() if key in chosen}
    stand_ins = {}
    for name, parameter in trained.items():
        dtype = wide_type(parameter) if offload is not None else parameter.dtype
        stand_in = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"))
        stand_in.grad = torch.empty_like(stand_in)
        stand_ins[name] = stand_in
    some: torch.optim.Optimizer = object.__new__(type(optimizer))
    groups = []
    for group in optimizer.param_groups:
        names = [name_of.get(id(parameter)) for parameter in group["params"]]
        groups.append({**group, "params": [stand_ins[name] for name in names if name in stand_ins]})
    vars(some).update(vars(optimizer), param_groups=groups, state=defaultdict(dict))
    step = inspect.unwrap(type(optimizer).step)
    try:
        with torch.no_grad():
            step(some)  # makes the state
            with recording.during(OPTIMIZER), recording.recording():
                step(some)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise StrategyError(
            f"{type(optimizer).__name__}: its step needs values or a closure, which a dry run does not have "
            f"({str(error).splitlines()[0][:120]}); use --sim_level 0"
        ) from error
    total = of_host = copies = 0
    for name, stand_in in stand_ins.items():
        if stand_in not in some.state:
            continue
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(some.state.get(stand_in)))
        wide = stand_in.numel() * stand_in.element_size() if offload is not None and offload.weights.keeps else 0
        if is_narrow(trained[name]):
            nbytes += wide
        elif name in moved:
            copies += wide
        total += nbytes
        of_host += nbytes if name in moved else 0
    return StateBytes(total, of_host, copies)


def _tensors(state: Any) -> Iterable[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)] if isinstance(state, dict) else []


@dataclass(frozen=True)
class StepRecord:
    """What one rank does in a training step."""

    recording: Recording
    parameter_bytes: int
    gradient_bytes: int
    """What stays for the optimizer when the backward pass has ended."""
    optimizer_bytes: int
    host_parameter_bytes: int
    """Of the parameters' bytes those in the memory of the host."""
    host_state_bytes: int
    """Of the optimizer's bytes those in the memory of the host."""
    host_copy_bytes: int
    """Copies of weights that an optimizer on the host has there, beside its state."""
    optimizer: str
    """Its class; empty when the script has none yet."""
    at_peak: Mapping[str, int]
    """Bytes at the peak of forward and backward pass by what they are for, parameters and optimizer state left out."""
    traffic: Totals
    """What the run-time counter shows."""
    actions_s: Mapping[tuple[int, Kind], float]
    """(stage, kind) of a pipeline's actions -> seconds for one micro batch"""
    actions_end_s: float
    """When the last of them has ended."""
    passes_end_s: float
    """When forward and backward pass have ended."""

    @property
    def host_bytes(self) -> int:
        """What stays in the memory of the host: parameters, optimizer state, copies of weights."""
        return self.host_parameter_bytes + self.host_state_bytes + self.host_copy_bytes

    @property
    def peak_bytes(self) -> int:
        """Most memory of the device at any moment of a step, optimizer state included."""
        there = self.parameter_bytes + self.optimizer_bytes - self.host_parameter_bytes - self.host_state_bytes
        return there + sum(self.at_peak.values())

    @property
    def step_s(self) -> float:
        """How long the step takes; of a pipeline without waiting for other stages."""
        return self.recording.clock_s

    @property
    def compute_s(self) -> float:
        """How long its operators take."""
        return self.recording.seconds(messages=False)

    @property
    def rest_s(self) -> float:
        """How long it takes after the last action of a pipeline: sums of gradients and the optimizer."""
        return self.step_s - self.actions_end_s


def record_step(
    sketch: Sketch, batch: Sequence[Tensor], mode: FakeTensorMode, device: DeviceProfile, root: nn.Module
) -> StepRecord:
    """Run a training step of a sketch, without gradients its forward pass alone, and return what was seen.

    Args:
        batch: the user's tensors, fake ones.
        root: the user's network; optimizers of its parameters are looked for.
    """
    parts = placed_parts(sketch)
    parameters = [item.parameter for item in parts]
    executors = [call.executor for call in sketch.call.own.values()]
    given = [*parameters, *batch, *(value for executor in executors for value in executor.buffers.values())]
    recording = Recording(device, given)
    watch = _Actions(recording)
    traffic.reset()
    with mode, ExitStack() as stack:
        for executor in executors:
            stack.enter_context(_watched(executor, recording))
        stack.enter_context(watch.watching())
        with recording.recording():
            _run_passes(sketch, batch, recording)
    moved = Totals(dict(traffic.calls), dict(traffic.bytes))
    found = finish_record(recording, {item.name: item.parameter for item in parts}, root, moved)
    return replace(found, actions_s=watch.means(), actions_end_s=watch.end_s)


def finish_record(
    recording: Recording, parameters: Mapping[str, nn.Parameter], root: nn.Module, moved: Totals
) -> StepRecord:
    """Step stand-ins of the script's optimizers after forward and backward pass, and return what was seen.

    Args:
        parameters: this rank's parts by name.
        root: the user's network; optimizers of its parameters are looked for.
        moved: what the passes have sent.
    """
    gradients = [local_part(value.grad) for value in parameters.values() if value.grad is not None]
    recording.kind_of(gradients, GRADIENTS)
    on_host = frozenset(name for name, value in parameters.items() if _is_on_host(value))
    recording.kind_of([local_part(g) for name in on_host if (g := parameters[name].grad) is not None], HOST)
    passes_end_s = recording.clock_s
    at_peak = {kind: nbytes for kind, nbytes in recording.memory.at_peak().items() if kind != HOST}
    trained = {name: local_part(value) for name, value in parameters.items() if value.grad is not None}
    optimizers = find_optimizers(root)
    states = [step_optimizer(optimizer, trained, root, recording, on_host) for optimizer in optimizers]
    return StepRecord(
        recording,
        sum(_nbytes(local_part(value)) for value in parameters.values()),
        sum(map(_nbytes, gradients)),
        sum(state.total for state in states),
        sum(_nbytes(local_part(parameters[name])) for name in on_host),
        sum(state.on_host for state in states),
        sum(state.host_copies for state in states),
        ", ".join(sorted({type(optimizer).__name__ for optimizer in optimizers})),
        at_peak,
        moved,
        {},
        0.0,
        passes_end_s,
    )


def _run_passes(sketch: Sketch, batch: Sequence[Tensor], recording: Recording) -> None:
    run_backward(sketch.call.run(batch), recording)
    recording.finish()


def run_backward(results: Sequence[Any], recording: Recording) -> None:
    """Take the gradients of a loss among these results, of all of them when none is a single number."""
    losses = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
    if losses and torch.is_grad_enabled():
        with recording.during(BACKWARD):
            loss = next((value for value in losses if not value.dim()), None)
            (torch.stack([value.sum() for value in losses]).sum() if loss is None else loss).backward()


class _Actions:
    """Notes how long the actions of a pipeline take on the clock of a recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._begun: tuple[Action, float] | None = None
        self._seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
        self.end_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the actions that run inside."""
        on_action.append(self._look)
        try:
            yield
        finally:
            on_action.remove(self._look)

    def means(self) -> dict[tuple[int, Kind], float]:
        """Return (stage, kind) -> seconds of one action, mean over the micro batches."""
        return {key: sum(values) / len(values) for key, values in self._seconds.items()}

    def _look(self, action: Action | None) -> None:
        now_s = self._recording.clock_s
        if self._begun is not None:
            begun, begin_s = self._begun
            self._seconds[begun.stage, begun.kind].append(now_s - begin_s)
        self._begun = None if action is None or not action.computes else (action, now_s)
        self._recording.phase = BACKWARD if action is not None and action.kind in ("B", "I", "W") else ACTIVATIONS
        self.end_s = now_s


@contextmanager
def _watched(executor: Executor, recording: Recording) -> Iterator[None]:
    """Say what the memory that an executor takes is for."""
    watched: Any = executor
    results = executor.results

    @functools.wraps(results)
    def results_at_once(step: Any, **_: Any) -> Any:  # a loss that comes late is no fake tensor
        return results(step)

    watched.backward = _during(BACKWARD, executor.backward, recording)
    watched.run_again = _during(RECOMPUTED, executor.run_again, recording)
    watched.results = results_at_once
    try:
        yield
    finally:
        for name in ("backward", "run_again", "results"):
            delattr(watched, name)


def _during(phase: str, call: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with recording.during(phase):
            return call(*args, **kwargs)

    return run


def _is_on_host(parameter: Tensor) -> bool:
    placed = placement_of(parameter)
    return placed is not None and placed.on_host


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
