"""The executor: runs the segments of a program for one or several copies of the batch, forward and backward.

Issue order (forward): segment k of copy 1, segment k of copy 2, then segment k+1 of copy 1, ... A segment waits for
the collectives that it reads, computes, and starts the ones that read it; while those of one copy are on their way the
other copy computes. The way back is the mirror image, one backward call per segment: the autograd engine never
decides the order. Gradients of a fusion group leave after the last copy's last segment that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from msrun.errors import ParallelError
from msrun.runtime.graph.collectives import Pending
from msrun.runtime.graph.operators.rule import DRAW, PLACE
from msrun.runtime.graph.parameters import GatheredGroup, ParameterGroup, PendingGradients
from msrun.runtime.graph.partition import LocalProgram
from msrun.runtime.graph.segments import Name, Segment
from msrun.runtime.layout import Mesh
from msrun.runtime.nn.dropout_stream import current_draw

AHEAD = 2
"""Groups gathered ahead of their use when gathered parts are freed (level3)."""


@dataclass
class _Copy:
    """What one copy of the batch holds during a step."""

    values: dict[Name, Tensor] = field(default_factory=dict)
    """What segments read: detached, so that every segment has an autograd graph of its own."""
    arriving: dict[Name, Pending] = field(default_factory=dict)
    """Results of collectives, not yet waited for."""
    written: dict[int, list[Tensor]] = field(default_factory=dict)
    """segment -> what it wrote, with its autograd graph."""
    gradients: dict[Name, list[Tensor | Pending]] = field(default_factory=dict)
    """Parts of a value's gradient that do not come through its leaf."""


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
    ) -> None:
        self._program = program
        self._segments = list(segments)
        self.groups = list(groups)
        self._mesh = mesh
        self._rank = rank
        self._buffers = dict(buffers)
        self._input_names = [node.name for node in program.inputs]
        self._group_of = {name: i for i, group in enumerate(self.groups) for name in group.placeholders}
        self._regathers = any(group.regathers for group in self.groups)
        self._given = {PLACE, DRAW} & {name for segment in segments for name in segment.reads}
        self._last_reader = {g: i for i, segment in enumerate(self._segments) for g in segment.groups}

    # -- forward ------------------------------------------------------------------------------------------------

    def begin(self) -> list[GatheredGroup]:
        """Return the parameters of one training step, for all its micro batches."""
        return [GatheredGroup(group) for group in self.groups]

    def forward(
        self,
        batches: Sequence[Sequence[Tensor]],
        *,
        needs_grad: bool,
        gathered: list[GatheredGroup] | None = None,
    ) -> Step:
        """Run the forward pass of every copy.

        Args:
            batches: each copy's input tensors.
            gathered: from `begin`, when several micro batches share one training step.
        """
        copies = [self._begin(batch, needs_grad) for batch in batches]
        self._give(copies)
        step = Step(self, copies, gathered or self.begin())
        self._prefetch(step, 0)
        with torch.set_grad_enabled(needs_grad):
            for index, segment in enumerate(self._segments):
                for group in segment.groups:
                    step.gathered[group].wait()
                self._prefetch(step, index + 1)
                for copy in copies:
                    self._run(step, copy, index, segment, needs_grad)
                self._free_after(step, index)
        return step

    def _begin(self, batch: Sequence[Tensor], needs_grad: bool) -> _Copy:
        copy = _Copy()
        for name, value in zip(self._input_names, batch, strict=True):
            copy.values[name] = value.detach().requires_grad_(needs_grad and value.requires_grad)
        copy.values.update(self._buffers)
        return copy

    def _give(self, copies: Sequence[_Copy]) -> None:
        """Give the program what it asks of the executor: this rank's place, the random numbers of every copy."""
        for index, copy in enumerate(copies if self._given else ()):
            if PLACE in self._given:
                copy.values[PLACE] = torch.tensor(self._rank)
            if DRAW in self._given:
                draw = current_draw.get()
                if draw is None:
                    raise ParallelError(
                        "a network with dropout runs only inside AutoParallel: its call draws the masks"
                    )
                copy.values[DRAW] = draw.key(index).to_tensor()

    def _prefetch(self, step: Step, index: int) -> None:
        """Start gathers of the groups that come next: all of them, or a few when gathered parts are freed again."""
        upcoming = [g for segment in self._segments[index:] for g in segment.new_groups]
        for group in upcoming[:AHEAD] if self._regathers else upcoming:
            step.gathered[group].start_gather()

    def _free_after(self, step: Step, index: int) -> None:
        for number, last in self._last_reader.items():
            if last == index and self.groups[number].regathers:
                step.gathered[number].free()

    def _run(self, step: Step, copy: _Copy, index: int, segment: Segment, needs_grad: bool) -> None:
        if not segment.is_empty:
            written = segment.module(*[self._read(step, copy, name) for name in segment.reads])
            if needs_grad:
                copy.written[index] = list(written)
            for name, value in zip(segment.writes, written, strict=True):
                copy.values[name] = value.detach().requires_grad_(value.requires_grad) if needs_grad else value
        for crossing in segment.crossings:
            source = self._read(step, copy, crossing.source)
            pending = crossing.collective.start_forward(source.detach(), self._mesh, self._rank)
            copy.arriving[crossing.result] = _WithGradient(pending, source.requires_grad)

    def _read(self, step: Step, copy: _Copy, name: Name) -> Tensor:
        group = self._group_of.get(name)
        if group is not None:
            return step.gathered[group].leaves[name]
        if name in copy.arriving:
            copy.values[name] = copy.arriving.pop(name).wait()
        return copy.values[name]

    # -- backward -----------------------------------------------------------------------------------------------

    def backward(
        self, step: Step, gradients: Sequence[Mapping[Name, Tensor]], *, reduces: bool = True
    ) -> dict[str, Tensor]:
        """Run the backward pass; `gradients` holds per copy the gradient of every result that has one.

        Args:
            reduces: False leaves the gradients of whole parameters where they are, for the next micro batch to add
                to; the last one, or `reduce`, sends them off.

        Returns:
            Parameter name -> gradient of its stored part; empty unless `reduces`.
        """
        leaving: list[PendingGradients] = []
        for copy, given in zip(step.copies, gradients, strict=True):
            for name, gradient in given.items():
                copy.gradients.setdefault(name, []).append(gradient)
            self._start_crossings(copy, len(self._segments) - 1)
        for index in reversed(range(len(self._segments))):
            segment = self._segments[index]
            self._regather(step, index)
            for copy in step.copies:
                self._run_backward(copy, index, segment)
                if index:
                    self._start_crossings(copy, index - 1)
            if reduces:
                leaving += [step.gathered[group].start_reduce() for group in segment.new_groups]
        return _arrived(leaving)

    def reduce(self, gathered: Sequence[GatheredGroup]) -> dict[str, Tensor]:
        """Return what backward passes without `reduces` have added up: parameter name -> gradient of its part."""
        return _arrived([group.start_reduce() for group in gathered])

    def _regather(self, step: Step, index: int) -> None:
        wanted = [g for segment in reversed(self._segments[: index + 1]) for g in segment.groups]
        again = list(dict.fromkeys(g for g in wanted if self.groups[g].regathers))
        for group in again[:AHEAD]:
            step.gathered[group].start_gather()
        for group in self._segments[index].groups:
            step.gathered[group].wait()

    def _run_backward(self, copy: _Copy, index: int, segment: Segment) -> None:
        written = copy.written.pop(index, [])
        outputs, gradients = [], []
        for name, value in zip(segment.writes, written, strict=True):
            gradient = self._take_gradient(copy, name)
            if gradient is not None and value.requires_grad:
                outputs.append(value)
                gradients.append(gradient)
        if outputs:
            torch.autograd.backward(outputs, gradients)

    def _start_crossings(self, copy: _Copy, index: int) -> None:
        """Start the way back of the collectives of one level: everything that read their results is done."""
        for crossing in self._segments[index].crossings:
            gradient = self._take_gradient(copy, crossing.result)
            if gradient is not None:
                pending = crossing.collective.start_backward(gradient, self._mesh, self._rank)
                copy.gradients.setdefault(crossing.source, []).append(pending)

    @staticmethod
    def _take_gradient(copy: _Copy, name: Name) -> Tensor | None:
        """Return the whole gradient of a value: from its leaf, from results, from collectives."""
        parts = [p.wait() if isinstance(p, Pending) else p for p in copy.gradients.pop(name, [])]
        leaf = copy.values.pop(name, None)
        if leaf is not None and leaf.grad is not None:
            parts.append(leaf.grad)
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def input_gradients(self, step: Step) -> list[list[Tensor | None]]:
        """Return per copy the gradients of the user's tensors, after `backward`."""
        return [[self._take_gradient(copy, name) for name in self._input_names] for copy in step.copies]

    def results(self, step: Step) -> list[list[Any]]:
        """Return the program's results for every copy, detached."""
        return [
            [
                self._read(step, copy, value.name).detach() if isinstance(value, fx.Node) else value
                for value in self._program.outputs
            ]
            for copy in step.copies
        ]


def _arrived(leaving: Sequence[PendingGradients]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for pending in leaving:
        result.update(pending.wait())
    return result


class _WithGradient(Pending):
    """A value on its way that becomes a leaf on arrival."""

    def __init__(self, pending: Pending, requires_grad: bool) -> None:
        self._pending = pending
        self._requires_grad = requires_grad

    def wait(self) -> Tensor:
        """Return the arrived value as a leaf."""
        return self._pending.wait().detach().requires_grad_(self._requires_grad)


@dataclass
class Step:
    """One forward pass, waiting for its backward pass."""

    executor: Executor
    copies: list[_Copy]
    gathered: list[GatheredGroup]
