"""CompiledCall: one network for one shape of input, captured, partitioned, cut and ready to run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import world
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.execute.executor import Executor
from msrun.runtime.execute.gradients import GradientGroup, ParameterGroup
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.execute.segment_runner import Step, ValueOnItsWay, arrived, full_like
from msrun.runtime.nn.random_stream import current_draw, slices_of_batch
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.batch.divided_batch import TWICE, check_loss, hand_out, keeps_graph
from msrun.runtime.parallel.batch.parts import BatchParts, join_values
from msrun.runtime.parallel.border import LateLoss, StepFunction, WholeResults, check_equal_gradients, enter_step
from msrun.runtime.parallel.gradients_in_backward import ArrivingGradients
from msrun.runtime.parallel.parameters.fusion import Way, group_parameters
from msrun.runtime.parallel.precision import (
    Scales,
    current_loss_scale,
    input_factor,
    leaf_factor,
    result_factor,
    scales,
)
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.collective_messages import Message
from msrun.runtime.partition.events import StepEvents, tell
from msrun.runtime.partition.program import LocalProgram, ParameterUse
from msrun.runtime.schedule.deferred_weights import compile_segments, count_deferred, defer_weights, deferred_in
from msrun.runtime.schedule.replay import (
    ActivationEstimate,
    RecomputeSpec,
    Region,
    estimate_activations,
    find_regions,
    parameters_of,
    plan_replays,
)
from msrun.runtime.schedule.segments import Segment, cut_segments, render_segment
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.sizes import SizesOfCall

SHOWN_NAMES = 2


def render_program(executor: Executor, copies: int, *, weights_by_schedule: bool = False) -> str:
    """Return every operator, collective and message of a training step, in the order in which one copy issues them.

    Args:
        copies: of the batch, which are interleaved.
        weights_by_schedule: deferred weight gradients are computed when the schedule of a pipeline says.
    """
    return "\n".join([*_forward(executor, copies), *_backward(executor, weights_by_schedule=weights_by_schedule)])


def _forward(executor: Executor, copies: int) -> Iterator[str]:
    """Yield the forward pass; between slots of segments other copies are issued."""
    order, started = executor.order, set[int]()
    yield from _gathers(executor, order.gathered_before[0], started)
    for slot in order.forward:
        for index in slot:
            yield from _gathers(executor, executor.segments[index].groups, started)
            yield from _gathers(executor, order.gathered_before[index + 1], started)
            segment = executor.segments[index]
            note = "" if segment.region is None else f", recomputed: {user_name(executor.regions[segment.region].path)}"
            yield from render_segment(index, segment, note)
        for index in slot:
            yield from _frees(executor, order.freed_after[index])
        if copies > 1 and slot is not order.forward[-1]:
            yield "    the same of the other copies"


def _backward(executor: Executor, *, weights_by_schedule: bool) -> Iterator[str]:
    """Yield the backward pass: what happens beside the way back of every segment."""
    order, started = executor.order, set[int]()
    replays = {replay.last: replay for replay in executor.replays if replay.segments}
    freed = {number for number, group in enumerate(executor.groups) if group.regathers}
    for index in (index for slot in order.backward for index in slot):
        yield from _gathers(executor, order.gathered_again[index], started, "again")
        if index in replays:
            yield f"    run again: segments {', '.join(map(str, replays[index].steps))}"
        yield f"backward of segment {index}"
        if deferred := deferred_in(executor.segments[index]):
            when = "when the schedule says" if weights_by_schedule else "after its collectives have started"
            yield f"    gradients of the weights of {', '.join(deferred)}: {when}"
        yield from _frees(executor, [number for number in executor.segments[index].new_groups if number in freed])
        for number in order.departures.get(index, []):
            group = executor.gradient_groups[number]
            yield f"    {'send' if group.is_sent else 'keep'} gradients {number}: {_names(group.members)}"


def _gathers(executor: Executor, numbers: Sequence[int], started: set[int], again: str = "") -> Iterator[str]:
    """Yield the gathers that have not started yet."""
    for number in numbers:
        if executor.groups[number].shard_axes and number not in started:
            started.add(number)
            yield f"    gather message {number}{again and ' '}{again}: {_names(executor.groups[number].members)}"


def _frees(executor: Executor, numbers: Sequence[int]) -> Iterator[str]:
    for number in numbers:
        yield f"    free message {number}: {_names(executor.groups[number].members)}"


def _names(members: Sequence[PlacedParameter]) -> str:
    more = f" and {len(members) - SHOWN_NAMES} more" if len(members) > SHOWN_NAMES else ""
    return ", ".join(user_name(member.name) for member in members[:SHOWN_NAMES]) + more


class ProgramCall:
    """Runs one captured call on this rank: one program, or stages of a pipeline."""

    program: LocalProgram
    events: StepEvents
    """Of the whole program on this rank."""
    parts: BatchParts
    own: Mapping[int, CompiledCall]
    """stage -> its program, for those that this rank runs"""
    groups: list[ParameterGroup]
    """Messages of this rank's parameters."""
    stored: list[PlacedParameter]
    """Trainable parameters of the call, in the same order on every rank: their gradients come back so."""
    arriving: ArrivingGradients
    """Where gradients go as they arrive."""
    whole: CompiledCall | None = None
    """The program that is all of the call; None: there are stages."""

    @property
    def copies(self) -> int:
        """Copies that are interleaved within a micro batch."""
        return self.parts.copies

    @property
    def gradient_groups(self) -> list[GradientGroup]:
        """Messages of their gradients."""
        return [group for call in self.own.values() for group in call.executor.gradient_groups]

    @cached_property
    def input_parts(self) -> list[int]:
        """Into how many parts the ranks cut each of the user's tensors."""
        return [self.program.mesh.extent(tuple(layout.used)) for layout in self.program.input_layouts]

    @abstractmethod
    def render(self) -> str:
        """Return the programs of this rank as text."""

    @abstractmethod
    def activations(self) -> ActivationEstimate:
        """Return what a rank keeps between the forward and the backward pass of one micro batch."""

    def programs_with_ends(self) -> list[tuple[LocalProgram, list[fx.Node] | None]]:
        """Return the programs of this rank with the values at which gradients come in; None: at the loss."""
        return [(self.program, None)]

    def messages_of_part(self) -> list[Message]:
        """Return what goes from stage to stage for one part of the batch."""
        return []

    def messages_of_step(self) -> list[Message]:
        """Return what the ranks of equal place in all stages exchange once in a step."""
        return []

    def use(self, sizes: SizesOfCall) -> None:
        """Run for these sizes from now on."""
        for call in self.own.values():
            call.executor.use(sizes)

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Let the programs use another tensor as a buffer or constant, by the name of its placeholder."""
        for call in self.own.values():
            call.executor.set_buffer(name, value)

    @abstractmethod
    def run(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Run the call with autograd: gradients reach the stored parameters by `backward()`.

        Returns what the captured graph gives back.
        """


@dataclass
class CompiledCall(ProgramCall):
    """Runs one captured call. Made by AutoParallel; lives as long as it."""

    program: LocalProgram
    segments: list[Segment]
    executor: Executor
    stored: list[PlacedParameter]
    """Trainable parameters that the program uses: their gradients come back in this order."""
    groups: list[ParameterGroup]
    parts: BatchParts
    scales: Scales
    """Factors of every part's scalar results and of its gradient; they differ only with micro batches."""
    regions: list[Region]
    """What is recomputed."""
    captured: CapturedGraph
    """What the program was made of."""
    arriving: ArrivingGradients = field(default_factory=ArrivingGradients)
    """Where gradients go as they arrive."""

    whole_results: WholeResults = field(default_factory=WholeResults)
    is_checked: bool = False
    """Whether the gradients of a backward pass have been compared between the ranks."""

    def __post_init__(self) -> None:
        self.own, self.whole = {0: self}, self

    @cached_property
    def result_parts(self) -> list[int]:
        """Into how many parts each result is cut."""
        layouts = self.program.output_layouts or [None] * len(self.program.outputs)
        return [1 if layout is None else self.program.mesh.extent(tuple(layout.used)) for layout in layouts]

    def render(self) -> str:
        """Return the program as text."""
        return render_program(self.executor, self.copies)

    @property
    def deferred_layers(self) -> int:
        """Linear layers whose weights' gradients are computed while those of their inputs travel."""
        return count_deferred(self.segments)

    @cached_property
    def events(self) -> StepEvents:  # type: ignore[override]
        """Those of a training step on this rank."""
        return tell(self.program)

    def activations(self) -> ActivationEstimate:
        """Return what a rank keeps between the forward and the backward pass of one micro batch."""
        return estimate_activations(self.events, self.segments, self.executor.replays, self.copies)

    def run(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Run the local program with autograd: gradients reach the stored parameters by `backward()`.

        Returns what the captured graph gives back.
        """
        parameters = [stored.parameter for stored in self.stored]
        enter_step(tensors, self.input_parts, leaf_factor)
        if self.arriving.taker is not None and self.parts.micro_batches > 1:
            raise StrategyError(
                f"step_in_backward or offload_gradients with {self.parts.micro_batches} micro batches, whose gradients "
                "are added up on the device: leave one of both out"
            )
        way = _RunMicroBatches if self.parts.micro_batches > 1 else _RunProgram
        return list(way.apply(self, torch.is_grad_enabled(), len(tensors), *tensors, *parameters))

    def backward(self, step: Step, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return parameter name -> gradient of its stored part, of those that were not trained with it already."""
        taker = self.arriving.taker
        if taker is None or step.is_verified:
            return self.executor.backward(step, gradients)
        left: dict[str, Tensor] = {}
        parameters = {stored.name: stored.parameter for stored in self.stored}
        trained = taker.trained()

        def hand_out(arrived: dict[str, Tensor]) -> None:
            mine = []
            for name, gradient in arrived.items():
                if id(parameters[name]) in trained:
                    mine.append((parameters[name], gradient))
                else:
                    left[name] = gradient
            taker.take(mine)

        self.executor.backward(step, gradients, hand_out=hand_out)
        taker.finish()
        return left

    def merge(self, results: Sequence[Sequence[Sequence[Any]]]) -> list[Any]:
        """Join the results of micro batches and copies: scalars are added up with their factor, others joined along
        dimension 0. What is still being added up becomes a LateLoss."""
        return [self._join(values) for values in zip(*self.parts.in_order(results), strict=True)]

    def _join(self, values: Sequence[Any]) -> Any:
        if isinstance(values[0], ValueOnItsWay):
            return LateLoss.of(lambda: self._join([arrived(value) for value in values]), values[0].dtype)
        return values[0] if len(values) == 1 else join_values(list(values), self.scales.loss)

    def gradients_of_results(
        self, gradients: Sequence[Tensor | None], whole_results: WholeResults
    ) -> list[Tensor | None]:
        """Return what comes in at the results, from each rank's own loss, as gradients of the mean of these losses."""
        whole = iter(whole_results.settle([g for g, n in zip(gradients, self.result_parts, strict=True) if n == 1]))
        return [
            next(whole) if count == 1 else None if gradient is None else gradient * result_factor(count)
            for gradient, count in zip(gradients, self.result_parts, strict=True)
        ]

    def check_first_pass(self) -> None:
        """Have the gradients of parameters that all ranks hold whole compared when the first backward pass is over."""
        if self.is_checked or world.simulation_level() is not None:
            return
        self.is_checked = True
        whole = [stored.parameter for stored in self.stored if not stored.placement.is_cut]
        torch.autograd.Variable._execution_engine.queue_callback(partial(check_equal_gradients, whole))

    def gradients_of_copies(
        self, gradients: Sequence[Tensor | None], whole_results: WholeResults
    ) -> list[dict[str, Tensor]]:
        """Return per copy the gradient of every result, by its name in the local graph."""
        copies: list[dict[str, Tensor]] = [{} for _ in range(self.copies)]
        of_results = self.gradients_of_results(gradients, whole_results)
        for value, gradient in zip(self.program.outputs, of_results, strict=True):
            if gradient is None or not isinstance(value, fx.Node):
                continue
            parts = [gradient * self.scales.loss] * self.copies if gradient.dim() == 0 else gradient.chunk(self.copies)
            for copy, part in zip(copies, parts, strict=True):
                copy[value.name] = copy[value.name] + part if value.name in copy else part
        return copies

    def gradients_of_loss(self, results: Sequence[Sequence[Any]]) -> list[dict[str, Tensor]]:
        """Return per copy the gradient that begins the backward pass of a micro batch."""
        return [{self.program.outputs[0].name: self._gradient_of_loss(values)} for values in results]

    def _gradient_of_loss(self, values: Sequence[Any]) -> Tensor:
        loss = values[0] if values and isinstance(values[0], ValueOnItsWay) else check_loss(list(values))
        return full_like(loss, self.scales.gradient * current_loss_scale.get())

    def join_input_gradients(self, gradients: Sequence[Sequence[Sequence[Tensor | None]]]) -> list[Tensor | None]:
        """Return the gradients of the user's tensors from those of micro batches and copies."""
        inputs: list[Tensor | None] = []
        for parts, count in zip(zip(*self.parts.in_order(gradients), strict=True), self.input_parts, strict=True):
            given = [part for part in parts if part is not None]
            if not given:
                inputs.append(None)
            elif not given[0].dim():  # every part got the same number
                inputs.append(torch.stack(given).sum())
            else:
                inputs.append((torch.cat(given) if len(given) > 1 else given[0]) * input_factor(count))
        return inputs


class _ForwardAgain:
    """Runs a call's forward pass once more: a backward pass uses up what it left, and few graphs are kept for two."""

    def __init__(self, compiled: CompiledCall, batches: Sequence[Sequence[Tensor]], first: Step) -> None:
        self._compiled, self._batches = compiled, batches
        self._buffers, self._is_verified, self._sizes = first.first_buffers, first.is_verified, first.sizes
        self._draw = current_draw.get()
        self._number = 0 if self._draw is None else self._draw.stream.step
        self._versions: list[int] | None = None

    def watch(self) -> None:
        """Remember what a later pass must find unchanged."""
        self._versions = self._present_versions()

    def run(self) -> Step:
        """Return another step of the same numbers."""
        if self._present_versions() != self._versions:
            raise CaptureError(
                "an input or a parameter of a step was written between two backward passes through it: write after the "
                "last one, or call the network again"
            )
        compiled, draw = self._compiled, self._draw
        compiled.executor.use(self._sizes)
        again = None if draw is None else replace(draw, stream=replace(draw.stream, step=self._number))
        token = current_draw.set(again)
        try:
            (places,) = compiled.parts.places
            with slices_of_batch(places, compiled.parts.total):
                step = compiled.executor.forward(self._batches, needs_grad=True, buffers=self._buffers)
        finally:
            current_draw.reset(token)
        compiled.executor.results(step)  # nobody else waits for those that are on their way
        step.is_verified = self._is_verified
        return step

    def _present_versions(self) -> list[int]:
        inputs = [value for batch in self._batches for value in batch]
        return [value._version for value in (*inputs, *(stored.parameter for stored in self._compiled.stored))]


class _RunProgram(StepFunction):
    """The whole local program as one step of the user's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, compiled: CompiledCall, is_grad_enabled: bool, count: int, *tensors: Tensor
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)  # a result that the loss leaves out has no gradient, nor what it alone reads
        inputs = tensors[:count]
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        (batches,) = compiled.parts.split(inputs)
        (places,) = compiled.parts.places
        with slices_of_batch(places, compiled.parts.total):
            step = compiled.executor.forward(batches, needs_grad=needs_grad)
        ctx.compiled, ctx.step, ctx.count = compiled, step, count
        ctx.again = _ForwardAgain(compiled, batches, step) if needs_grad and compiled.arriving.taker is None else None
        ctx.whole = compiled.whole_results.of_step()
        results = compiled.merge([compiled.executor.results(step, leaves_late=needs_grad)])
        reached = compiled.executor.results_with_gradient(step) if needs_grad else frozenset()
        fixed = [v for i, v in enumerate(results) if isinstance(v, Tensor) and i not in reached]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _RunProgram.refuse_second_derivatives()
        _RunProgram.begin_backward()
        compiled: CompiledCall = ctx.compiled
        step, ctx.step = ctx.step, None
        again: _ForwardAgain | None = ctx.again
        if step is None:
            if again is None:
                raise CaptureError(TWICE)
            step, ctx.whole = again.run(), WholeResults()
        elif again is not None and keeps_graph():
            again.watch()
        if not keeps_graph():
            ctx.again = None
        if not step.is_verified:
            compiled.check_first_pass()
        with torch.enable_grad():
            by_name = compiled.backward(step, compiled.gradients_of_copies(gradients, ctx.whole))
        inputs = compiled.join_input_gradients([compiled.executor.input_gradients(step)])
        return (None, None, None, *inputs, *(by_name.get(stored.name) for stored in compiled.stored))


class _RunMicroBatches(StepFunction):
    """The local program for one micro batch after the other, each forward and backward, as one autograd step."""

    @staticmethod
    def forward(
        ctx: Any, compiled: CompiledCall, is_grad_enabled: bool, count: int, *tensors: Tensor
    ) -> tuple[Any, ...]:
        executor = compiled.executor
        ctx.set_materialize_grads(False)
        ctx.whole = compiled.whole_results.of_step()
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        parameters = executor.begin()
        micro_batches = compiled.parts.split(tensors[:count])
        results: list[list[list[Any]]] = []
        of_inputs: list[list[list[Tensor | None]]] = []
        by_name: dict[str, Tensor] = {}
        reached: frozenset[int] = frozenset()
        for number, (batches, slices) in enumerate(zip(micro_batches, compiled.parts.places, strict=True)):
            with slices_of_batch(slices, compiled.parts.total):
                step = executor.forward(batches, needs_grad=needs_grad, gathered=parameters)
            results.append(executor.results(step, leaves_late=needs_grad))
            if needs_grad:
                reached = executor.results_with_gradient(step)
                is_last = number == len(micro_batches) - 1
                by_name = executor.backward(step, compiled.gradients_of_loss(results[-1]), reduces=is_last)
                of_inputs.append(executor.input_gradients(step))
        if needs_grad:
            joined = compiled.join_input_gradients(of_inputs)
            ctx.gradients = [*joined, *(by_name.get(stored.name) for stored in compiled.stored)]
            ctx.loss_scale = current_loss_scale.get()
        merged = compiled.merge(results)
        ctx.mark_non_differentiable(*(v for i, v in enumerate(merged) if isinstance(v, Tensor) and i not in reached))
        return tuple(merged)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _RunMicroBatches.refuse_second_derivatives()
        _RunMicroBatches.begin_backward()
        (incoming,) = ctx.whole.settle(gradients[:1])
        return None, None, None, *hand_out(ctx, [incoming, *gradients[1:]])


def build_compiled_call(
    captured: CapturedGraph,
    program: LocalProgram,
    stored: dict[str, PlacedParameter],
    buffers: dict[str, Tensor],
    *,
    mesh: Mesh,
    rank: int,
    settings: ParallelSettings = ParallelSettings(),  # noqa: B008 - frozen
    parts: BatchParts = BatchParts(),  # noqa: B008 - frozen
    recompute: Mapping[str, RecomputeSpec] = MappingProxyType({}),
    memory_of: Mapping[str, str] | None = None,
    defers_weights: bool = False,
) -> CompiledCall:
    """Group the parameters, cut the program into segments and make its executor.

    Args:
        recompute: module path -> how it is recomputed.
        memory_of: value -> the parameter whose memory it is, by name; None: to be found, of a whole program.
        defers_weights: weights' gradients are computed when the schedule of a pipeline says.
    """
    used = [_Used(stored[name], program.parameters[name]) for name in _order_of_use(program)]
    regions = find_regions(program, recompute)
    again = [region for region in regions if region.spec.parallel_optimizer_comm_recompute]
    regathered = {each.use.name for each in used} if settings.level == "level3" else parameters_of(program, again)
    if memory_of is None:
        is_freed = any(each.stored.placement.shard_axes and each.use.name in regathered for each in used)
        memory_of = _find_memory(program) if is_freed else {}
    if memory_of is None:
        regathered = set()
        program.notes.append("gathered parameters are kept for the backward pass: only a run could tell who views them")
    groups = _gather_groups(used, settings, regathered, mesh, rank)
    group_of = {name: number for number, group in enumerate(groups) for name in group.placeholders}
    region_of = {name: number for number, region in enumerate(regions) for name in region.nodes}
    freed = {name for group in groups if group.regathers for name in group.placeholders}
    memory_of = {value: parameter for value, parameter in (memory_of or {}).items() if parameter in freed}
    segments = cut_segments(program, group_of, region_of, memory_of)
    if settings.overlaps_weights or defers_weights:
        dimensions = {use.node.name: len(use.shape) for _, use in used}
        defer_weights(segments, dimensions, regions, everywhere=defers_weights)
    if settings.compiler is not None and world.simulation_level() is None:
        program.notes.append(compile_segments(segments, settings.compiler))
    device_buffers = {node.name: buffers[name] for name, node in program.buffers.items()}
    device_buffers |= {name: constant for name, (_, constant) in program.constants.items()}
    executor = Executor(
        program,
        segments,
        groups,
        mesh=mesh,
        rank=rank,
        buffers=device_buffers,
        gradient_groups=_gradient_groups(used, settings, regathered, mesh, rank),
        regions=regions,
        memory_of=memory_of,
    )
    factors = scales(settings.compat, parts.copies, parts.micro_batches)
    trained = [stored for stored, _ in used if stored.parameter.requires_grad]
    return CompiledCall(program, segments, executor, trained, groups, parts, factors, regions, captured)


def activations_of(program: LocalProgram, recompute: Mapping[str, RecomputeSpec], copies: int) -> ActivationEstimate:
    """Return what a step of a program keeps, before its parameters are put in place.

    Args:
        recompute: module path -> how it is recomputed.
    """
    regions = find_regions(program, recompute)
    region_of = {name: number for number, region in enumerate(regions) for name in region.nodes}
    segments = cut_segments(program, {}, region_of)
    return estimate_activations(tell(program), segments, plan_replays(segments, regions, program.outputs), copies)


def _find_memory(program: LocalProgram) -> dict[str, str] | None:
    """Return which values are whose memory; None when only a run could tell."""
    try:
        return tell(program).parameter_memory
    except RuntimeError:  # an operator that needs values
        return None


class _Used(NamedTuple):
    """A parameter that operators read: as it is stored, and as the graph uses it."""

    stored: PlacedParameter
    use: ParameterUse


def _gather_groups(
    used: Sequence[_Used], settings: ParallelSettings, regathered: Collection[str], mesh: Mesh, rank: int
) -> list[ParameterGroup]:
    """Return the parameters in the groups in which they travel to their use."""
    groups = []
    for members in _grouped(used, "gather", settings, regathered):
        first = members[0]
        is_freed = bool(first.stored.placement.shard_axes) and first.use.name in regathered
        groups.append(ParameterGroup(*_columns(members), mesh, rank, is_freed, dtype=first.use.dtype))
    return groups


def _gradient_groups(
    used: Sequence[_Used], settings: ParallelSettings, regathered: Collection[str], mesh: Mesh, rank: int
) -> list[GradientGroup]:
    """Return the trained parameters in the groups in which their gradients travel."""
    return [
        GradientGroup(
            *_columns(members),
            mesh,
            rank,
            settings.level != "level1",
            _sum_dtype(members[0].use.dtype, settings.gradient_fp32_sync),
            members[0].use.has_row_gradient,
        )
        for members in _grouped(used, "reduce", settings, regathered)
        if members[0].stored.parameter.requires_grad
    ]


def _grouped(
    used: Sequence[_Used], way: Way, settings: ParallelSettings, regathered: Collection[str]
) -> list[list[_Used]]:
    """Return parameters that travel together and are read in one type."""
    pairs = [(stored, use.partial_axes) for stored, use in used]
    alone = {use.name for _, use in used if use.has_row_gradient}
    together = group_parameters(pairs, way, settings.comm_fusion, regathered=regathered, alone=alone)
    types = [use.dtype for _, use in used]
    return [[used[i] for i in members] for members in _of_one_type(together, types)]


def _columns(members: Sequence[_Used]) -> tuple[list[PlacedParameter], list[str], Axes]:
    """Return the members of a group, their placeholders, and the axes along which their gradients are partial."""
    return [stored for stored, _ in members], [use.node.name for _, use in members], members[0].use.partial_axes


def _of_one_type(groups: Sequence[Sequence[int]], types: Sequence[torch.dtype]) -> list[list[int]]:
    """Cut groups further, so that the members of each are read in one type."""
    alike = [[[i for i in members if types[i] == dtype] for dtype in dict.fromkeys(types)] for members in groups]
    return [members for parts in alike for members in parts if members]


def _sum_dtype(dtype: torch.dtype, is_wide: bool) -> torch.dtype:
    """Return the type in which gradients are added up."""
    return torch.float32 if is_wide and dtype in (torch.float16, torch.bfloat16) else dtype


def _order_of_use(program: LocalProgram) -> list[str]:
    """Return the names of the parameters that operators read, in order of first use."""
    name_of = {use.node: name for name, use in program.parameters.items()}
    order: dict[str, None] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            order.update(dict.fromkeys(name_of[n] for n in node.all_input_nodes if n in name_of))
    return list(order)
