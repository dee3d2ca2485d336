"""The executor: runs the segments of a program for one or several copies of the batch, forward and backward.

Issue order (forward): slot k of copy 1, slot k of copy 2, then slot k+1 of copy 1, ...; a slot is a run of segments
(`interleaving`). A segment waits for the collectives that it reads, computes, and starts the ones that read it; while
those of one copy are on their way the other copy computes. The way back is the mirror image, one backward call per
segment: the autograd engine never decides the order. Gradients of a fusion group leave after the last copy's last
segment that reads it.

A recomputed region runs twice: forward, forgetting what only it needs, and again before its backward pass (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from msrun.runtime.execute.gradients import (
    GradientGroup,
    LeavingGradients,
    ParameterGroup,
    StepParameters,
    plan_departures,
)
from msrun.runtime.execute.segment_runner import Copy, SegmentRunner, Step
from msrun.runtime.nn.random_stream import current_draw
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.schedule.deferred_weights import (
    DeferredWeightGradient,
    compute_deferred_weights,
    forget_deferred_weights,
    take_deferred_weights,
)
from msrun.runtime.schedule.replay import (
    Region,
    Replay,
    backward_slots,
    forward_slots,
    join_slots,
    plan_replays,
    way_back,
)
from msrun.runtime.schedule.segments import Name, Segment, plan_buffers
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.operators.rule import DRAW, PLACE
from msrun.runtime.sharding.sizes import SizesOfCall

AHEAD = 2
"""Groups gathered ahead of their use when gathered parts are freed again (level3)."""


@dataclass(frozen=True)
class IssueOrder:
    """What happens at which segment; groups and segments by their numbers."""

    forward: list[list[int]]
    """Slots of segments: what one copy issues before the next one."""
    backward: list[list[int]]
    gathered_before: list[list[int]]
    """Segment -> groups to gather before it; one entry more, for the end."""
    gathered_again: list[list[int]]
    """Segment -> groups to gather before its way back."""
    freed_after: list[list[int]]
    """Segment -> groups that no later segment reads and that are gathered again for the way back."""
    way_back: list[int]
    """All segments in the order of the backward pass."""
    next_back: dict[int, int]
    """Segment -> the one whose way back follows, if any."""
    departures: dict[int, list[int]]
    """Segment -> gradient groups that are complete after its way back."""


def plan_issue_order(
    segments: Sequence[Segment],
    groups: Sequence[ParameterGroup],
    gradient_groups: Sequence[GradientGroup],
    replayed: Set[int],
    spans: Sequence[range] = (),
) -> IssueOrder:
    """Return the order.

    Args:
        replayed: last segments of recomputed regions.
        spans: segments that a copy runs forward without a break.
    """
    gathered = {number for number, group in enumerate(groups) if group.shard_axes}
    freed = {number for number, group in enumerate(groups) if group.regathers}
    last_reader = {group: index for index, segment in enumerate(segments) for group in segment.groups}
    order = way_back(segments)
    return IssueOrder(
        forward=join_slots(forward_slots(segments, gathered), spans),
        backward=backward_slots(segments, gathered, replayed),
        gathered_before=[_upcoming(segments, index, gathered, bool(freed)) for index in range(len(segments) + 1)],
        gathered_again=[_following(segments, order[order.index(i) :], freed) for i in range(len(segments))],
        freed_after=[[g for g in freed if last_reader.get(g) == index] for index in range(len(segments))],
        way_back=order,
        next_back=dict(pairwise(order)),
        departures=plan_departures(segments, gradient_groups),
    )


def _upcoming(segments: Sequence[Segment], index: int, gathered: Set[int], is_few: bool) -> list[int]:
    """Return the next groups: all of them at the start, or a few at a time when gathered parts are freed again."""
    upcoming = [group for segment in segments[index:] for group in segment.new_groups if group in gathered]
    if is_few:
        return upcoming[:AHEAD]
    return [] if index else upcoming


def _following(segments: Sequence[Segment], rest: Sequence[int], freed: Set[int]) -> list[int]:
    """Return the next groups of the way back."""
    upcoming = (group for index in rest for group in segments[index].groups)
    return list(dict.fromkeys(group for group in upcoming if group in freed))[:AHEAD]


class Executor:
    """Runs one program. Owned by one AutoParallel; one step at a time."""

    def __init__(
        self,
        program: LocalProgram,
        segments: Sequence[Segment],
        groups: Sequence[ParameterGroup],
        *,
        mesh: Mesh,
        rank: int,
        buffers: Mapping[Name, Tensor],
        gradient_groups: Sequence[GradientGroup],
        regions: Sequence[Region],
        memory_of: Mapping[Name, Name],
    ) -> None:
        """Make an executor.

        Args:
            gradient_groups: parameters whose gradients travel together.
            regions: what is recomputed; `segments` are cut at their borders.
            memory_of: value -> the parameter whose memory it is, of those that are given back before the step ends.
        """
        self._program = program
        self.segments = list(segments)
        self.groups = list(groups)
        self.gradient_groups = list(gradient_groups)
        self.regions = list(regions)
        self.replays = plan_replays(self.segments, regions, program.outputs)
        self._mesh = mesh
        self._rank = rank
        self.buffers = dict(buffers)
        self._input_names = [node.name for node in program.inputs]
        self._sizes: SizesOfCall = {}
        self._asked = {PLACE, DRAW} & {name for segment in self.segments for name in segment.reads}
        self._buffer_plan = plan_buffers(program, self.segments)
        self.runner = SegmentRunner(
            program,
            self.segments,
            self.groups,
            self.replays,
            self._buffer_plan,
            mesh=mesh,
            rank=rank,
            memory_of=memory_of,
        )
        changed = set(self._buffer_plan.written)
        self._fixed_buffers = {name: value for name, value in buffers.items() if name not in changed}
        self.order = plan_issue_order(
            self.segments,
            self.groups,
            self.gradient_groups,
            {r.last for r in self.replays if r.segments},
            self._buffer_plan.spans,
        )

    def use(self, sizes: SizesOfCall) -> None:
        """Run calls of these sizes from now on."""
        if sizes is not self._sizes:
            self._sizes = sizes
            for segment in self.segments:
                segment.use(sizes)

    def set_buffer(self, name: Name, value: Tensor) -> None:
        """Use another tensor as a buffer or constant from the next step on."""
        if name in self.buffers:
            self.buffers[name] = value
        if name in self._fixed_buffers:
            self._fixed_buffers[name] = value

    # -- forward ------------------------------------------------------------------------------------------------

    def begin(self) -> StepParameters:
        """Return the parameters of one training step, for all its micro batches."""
        return StepParameters(self.groups, self.gradient_groups)

    def forward(
        self,
        batches: Sequence[Sequence[Tensor]],
        *,
        needs_grad: bool,
        gathered: StepParameters | None = None,
        buffers: Mapping[Name, Tensor] | None = None,
    ) -> Step:
        """Run the forward pass of every copy.

        Args:
            batches: each copy's input tensors.
            gathered: from `begin`, when several micro batches share one training step.
            buffers: what an earlier step began with, to run it again: those of the module stay as they are. None: they
                go from step to step.
        """
        copies = [self._begin(batch, needs_grad) for batch in batches]
        self._give(copies)
        step = Step(copies, gathered or self.begin())
        step.sizes = self._sizes
        # Autograd may keep what a segment read, and the module's buffer is written when all is done.
        step.buffers = {name: (buffers or self.buffers)[name].clone() for name in self._buffer_plan.written}
        step.first_buffers = dict(step.buffers)
        self._prefetch(step, 0)
        with torch.set_grad_enabled(needs_grad):
            for slot in self.order.forward:
                for copy in copies:
                    for index in slot:
                        if copy is copies[0]:
                            self._wait_for_parameters(step, index)
                            self._prefetch(step, index + 1)
                        self.runner.run(step, copy, index, needs_grad)
                for index in slot:
                    self._free_after(step, index)
        if buffers is None:
            with torch.no_grad():
                for name, value in step.buffers.items():
                    self.buffers[name].copy_(value)
        return step

    def _begin(self, batch: Sequence[Tensor], needs_grad: bool) -> Copy:
        copy = Copy()
        for name, value in zip(self._input_names, batch, strict=True):
            copy.values[name] = value.detach().requires_grad_(needs_grad and value.requires_grad)
        copy.values.update(self._fixed_buffers)
        return copy

    def _give(self, copies: Sequence[Copy]) -> None:
        """Give the program what it asks of the executor: this rank's place, the random numbers of every copy."""
        for index, copy in enumerate(copies if self._asked else ()):
            if PLACE in self._asked:
                copy.values[PLACE] = torch.tensor(self._rank - self._mesh.first_rank)
            if DRAW in self._asked:
                draw = current_draw.get()
                assert draw is not None  # it is set while AutoParallel runs a network
                copy.values[DRAW] = draw.key(index).to_tensor()

    def _prefetch(self, step: Step, index: int) -> None:
        for group in self.order.gathered_before[index]:
            step.parameters.gathered[group].start_gather()

    def _wait_for_parameters(self, step: Step, index: int) -> None:
        for group in self.segments[index].groups:
            step.parameters.gathered[group].wait()

    def _free_after(self, step: Step, index: int) -> None:
        for group in self.order.freed_after[index]:
            step.wait_for_readers(group)
            step.parameters.gathered[group].free()

    # -- backward -----------------------------------------------------------------------------------------------

    def backward(
        self,
        step: Step,
        gradients: Sequence[Mapping[Name, Tensor]],
        *,
        reduces: bool = True,
        deferred: list[DeferredWeightGradient] | None = None,
        hand_out: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> dict[str, Tensor]:
        """Run the backward pass; `gradients` holds per copy the gradient of every result that has one.

        Args:
            reduces: False when more micro batches of this step follow: gradients are added up, at level2 and level3
                those of the stored part only; the last one, or `reduce`, gives them.
            deferred: gets what gradients of weights are left for the caller to add, before `reduce`; None: none are.
            hand_out: gets the gradients message by message as they arrive; see `LeavingGradients`.

        Returns:
            Parameter name -> gradient of its stored part; empty unless `reduces`, and with `hand_out`.
        """
        self.use(step.sizes)
        forget_deferred_weights()
        leaving = LeavingGradients(hand_out)
        for copy, given in zip(step.copies, gradients, strict=True):
            for name, gradient in given.items():
                copy.gradients.setdefault(name, []).append(gradient)
            self.runner.start_crossings(copy, self.order.way_back[0])
        for slot in self.order.backward:
            for copy in step.copies:
                for index in slot:
                    if copy is step.copies[0]:
                        self._have_values_again(step, index)
                    self.runner.run_backward(step, copy, index)
                    self.runner.give_to_parameters(step, copy, index)
                    if index in self.order.next_back:
                        self.runner.start_crossings(copy, self.order.next_back[index])
                    if deferred is None:
                        compute_deferred_weights()
                    else:
                        deferred += take_deferred_weights()
                    if copy is step.copies[-1]:
                        self._give_back(step, index, leaving, reduces=reduces)
        for task in step.tasks:
            task.wait()
        return leaving.arrive()

    def _give_back(self, step: Step, index: int, leaving: LeavingGradients, *, reduces: bool) -> None:
        """Give gathered parts back, and send off the gradients that no earlier segment adds to.

        A message that is cut on arrival has the time of one segment, the next one waits for it: it holds whole
        parameters' worth of memory.
        """
        for number in self.segments[index].new_groups:
            if self.groups[number].regathers:
                step.wait_for_readers(number)
                step.parameters.gathered[number].free()
        for number in self.order.departures.get(index, []):
            total = step.parameters.sums[number]
            for group in {self.runner.group_of[name] for name in total.group.placeholders}:
                step.wait_for_readers(group)
            if total.group.shard_axes:
                leaving.make_room(step.parameters.sums)
            if reduces:
                leaving.add(total.finish(step.parameters.leaf))
            else:
                total.add(step.parameters.leaf)

    def reduce(self, gathered: StepParameters) -> dict[str, Tensor]:
        """Return what backward passes without `reduces` have added up: parameter name -> gradient of its part."""
        leaving = LeavingGradients()
        for group in gathered.sums:
            leaving.add(group.finish(gathered.leaf))
        return leaving.arrive()

    def _have_values_again(self, step: Step, index: int) -> None:
        """Gather and compute again what the forward pass has forgotten."""
        self._regather(step, index)
        region = self.segments[index].region
        if region is not None and index == self.replays[region].last:
            self.run_again(step, self.replays[region])

    def _regather(self, step: Step, index: int) -> None:
        self._wait_for_parameters(step, index)  # first: a message and what it is copied to are both held till then
        for group in self.order.gathered_again[index]:
            step.parameters.gathered[group].start_gather()

    @torch.enable_grad()
    def run_again(self, step: Step, replay: Replay) -> None:
        """Compute a region once more from what was kept, copies interleaved; now with all that backward needs."""
        for index in replay.steps:
            self._wait_for_parameters(step, index)
            for copy in step.copies:
                self.runner.run_again(step, copy, index, replay)

    def input_gradients(self, step: Step) -> list[list[Tensor | None]]:
        """Return per copy the gradients of the user's tensors, after `backward`."""
        return [[copy.take_gradient(name) for name in self._input_names] for copy in step.copies]

    def results(self, step: Step, *, leaves_late: bool = False) -> list[list[Any]]:
        """Return the program's results for every copy, detached.

        Args:
            leaves_late: give scalars that are still being added up as `ValueOnItsWay`, to be waited for later.
        """
        return [
            [self._result(step, copy, value, leaves_late=leaves_late) for value in self._program.outputs]
            for copy in step.copies
        ]

    def results_with_gradient(self, step: Step) -> frozenset[int]:
        """Return the indexes of the results that gradients flow back from, after a forward pass for training."""
        (copy, *_) = step.copies
        return frozenset(
            index
            for index, value in enumerate(self._program.outputs)
            if isinstance(value, fx.Node) and self.runner.requires_grad(step, copy, value.name)
        )

    def _result(self, step: Step, copy: Copy, value: Any, *, leaves_late: bool) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value.name in copy.copied:
            return copy.copied[value.name]
        if leaves_late and (late := copy.arriving.get(value.name)) and late.is_number_on_host:
            return late
        return self.runner.read(step, copy, value.name).detach()
