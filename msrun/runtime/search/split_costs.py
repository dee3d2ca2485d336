"""What one split of one operator costs, and what it costs to bring a value from one layout to another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.operators import TensorSpec, copy_work, message_seconds
from msrun.runtime.partition.collective_messages import Message, sums_of_gradient
from msrun.runtime.partition.local_work import LocalCollective, LocalWork, LocalWorks
from msrun.runtime.partition.price import StepSpec
from msrun.runtime.search.problem import Costs
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout
from msrun.runtime.sharding.operators.rule import Form, LabelSplit, OperatorCall
from msrun.runtime.sharding.redistribution import Move, plan_directly

MOST_AXES_FREE = 2
"""On a mesh of so many axes every axis may cut any dimension; on a larger one the outer and the inner axes go together,
as data parallel between hosts and tensor parallel in a host do."""
MOST_INNER_RANKS = 16
"""Ranks that the inner axes of a larger mesh may have."""


def find_splits(form: Form, mesh: Mesh) -> list[LabelSplit]:
    """Return the legal splits of an operator, the whole one first; the order is the same on every rank."""
    labels = _labels(form)
    found: dict[tuple[tuple[str, Axes], ...], LabelSplit] = {(): {}}
    for pieces, places in _placements(mesh, labels):
        split: dict[str, Axes] = {}
        for axes, label in zip(pieces, places, strict=True):
            if label is not None:
                split[label] = (*split.get(label, ()), *axes)
        is_one_way = sum(way in split for way in form.ways) < 2
        if is_one_way and all(form.can_split(label, mesh.extent(axes)) for label, axes in split.items()):
            found.setdefault(tuple(sorted(split.items())), split)
    return list(found.values())


def parts_of(form: Form, split: LabelSplit, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return MindSpore's tuples of a split: parts per dimension, per input."""
    return tuple(form.layout_of_input(index, split, mesh).numbers(mesh) for index in range(len(form.inputs)))


def _labels(form: Form) -> list[str]:
    """Return the labels that may be cut at all, in order of appearance."""
    rows = (*form.inputs, form.output, *form.others, tuple(form.ways))
    seen = dict.fromkeys(label for labels in rows for label in labels if label is not None)
    uncut = {*form.whole, *form.ways.values()}
    return [label for label in seen if label not in uncut and form.sizes[label] > 1]


def _placements(mesh: Mesh, labels: Sequence[str]) -> Iterator[tuple[tuple[Axes, ...], tuple[str | None, ...]]]:
    """Yield runs of axes and the label that each of them cuts, or None."""
    places: list[str | None] = [*labels, None]
    if len(mesh.axes) <= MOST_AXES_FREE:
        pieces: tuple[Axes, ...] = tuple((axis,) for axis in mesh.axes)
        for chosen in itertools.product(places, repeat=len(pieces)):
            yield pieces, chosen
        return
    for begin in range(len(mesh.axes) + 1):
        outer, inner = mesh.axes[:begin], mesh.axes[begin:]
        if inner and mesh.extent(inner) > MOST_INNER_RANKS and outer:
            continue
        for first, second in itertools.product(places if outer else [None], places if inner else [None]):
            if first is not None or not outer:  # what the outer axes leave whole, the inner ones need not cut
                yield (outer, inner), (first, second)


_COPY = "copy"
_Passed = tuple[str, Axes, int]
"""Operation, or a copy beside it; axes; and the value's bytes divided by the message's."""


@dataclass(frozen=True)
class MovedValue:
    """A value on its way to a reader."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    has_gradient: bool
    """Whether a gradient comes back."""


class SplitCosts:
    """Prices choices on one mesh; equal questions are answered once."""

    def __init__(self, device: DeviceProfile, step: StepSpec, works: LocalWorks) -> None:
        self.works = works
        self._mesh = works.mesh
        self._device = device
        self._step = step
        self._brought: dict[tuple[Any, ...], float] = {}
        self._messages: dict[tuple[TensorLayout, TensorLayout, Axes, bool], tuple[_Passed, ...]] = {}
        self._tables: dict[tuple[Any, ...], Costs] = {}

    def of_work(self, work: LocalWork) -> float:
        """Return the seconds of an operator with its own messages, forward and backward."""
        messages = (self._of_collective(each, waits=index == 0) for index, each in enumerate(work.collectives))
        return sum(work.compute_seconds(self._device)) + sum(messages)

    def kept_bytes(self, call: OperatorCall, form: Form, split: LabelSplit, work: LocalWork) -> float:
        """Return what an operator keeps for the backward pass beside its inputs, which their makers keep."""
        results = [call.node.meta["val"]] if isinstance(call.node.meta["val"], Tensor) else call.node.meta["val"]
        rows = (form.output, *form.others)
        made = [
            TensorSpec(form.layout(labels, split).local_shape(self._mesh, value.shape), value.dtype).nbytes
            for labels, value in zip(rows, results, strict=False)
            if isinstance(value, Tensor)
        ]
        is_read_back = bool(work.backward) and not work.aliases
        return work.saved_bytes + (sum(made) if is_read_back else 0)

    def of_parameter(
        self, value: Tensor, layout: TensorLayout, partial_axes: Axes, *, is_trained: bool
    ) -> tuple[float, float]:
        """Return seconds and bytes of a parameter that an operator reads in this layout.

        Where its gradient travels with others, it counts with its bytes and its share of the bucket.
        """
        size = TensorSpec(layout.local_shape(self._mesh, value.shape), value.dtype).nbytes
        if not is_trained:
            return 0.0, float(size)
        states = self._step.optimizer_states
        update = size * (3 + 2 * states) / self._device.memory_bandwidth
        messages = sums_of_gradient(self._step.summed_bytes(size, value.dtype), (), partial_axes, self._mesh)
        return update + sum(self._shared(message, axes, size) for message, axes in messages), size * (2.0 + states)

    def table(
        self, value: MovedValue, held: Sequence[TensorLayout], wanted: Sequence[TensorLayout], entered: Sequence[Axes]
    ) -> Costs:
        """Return the seconds from every held layout to every wanted one; [held, wanted]."""
        key = (value, tuple(held), tuple(wanted), tuple(entered))
        if key not in self._tables:
            pairs = list(zip(wanted, entered, strict=True))
            rows = {layout: number for number, layout in enumerate(dict.fromkeys(held))}
            columns = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
            small = np.array([[self.to_bring(value, layout, *pair) for pair in columns] for layout in rows])
            self._tables[key] = small[np.ix_([rows[layout] for layout in held], [columns[pair] for pair in pairs])]
        return self._tables[key]

    def row(
        self, value: MovedValue, held: Sequence[TensorLayout], wanted: Sequence[TensorLayout], entered: Sequence[Axes]
    ) -> Costs:
        """Return the seconds from each held layout to the wanted one at its place; [held]."""
        key = (value, tuple(held), tuple(wanted), tuple(entered), "row")
        if key not in self._tables:
            each = zip(held, wanted, entered, strict=True)
            self._tables[key] = np.array([self.to_bring(value, *layouts) for layouts in each])
        return self._tables[key]

    def to_bring(self, value: MovedValue, held: TensorLayout, wanted: TensorLayout, entered: Axes) -> float:
        """Return the seconds to bring a value from one layout to another, and its gradient back.

        Args:
            entered: axes along which the reader leaves partial sums of the gradient.
        """
        entered = entered if value.has_gradient else ()
        if held == wanted and not entered:
            return 0.0
        key = (value, held, wanted, entered)
        if key not in self._brought:
            self._brought[key] = self._bring(value, held, wanted, entered)
        return self._brought[key]

    def _bring(self, value: MovedValue, held: TensorLayout, wanted: TensorLayout, entered: Axes) -> float:
        size = TensorSpec(value.shape, value.dtype).nbytes
        return sum(
            self._copy_s(size // parts)
            if operation == _COPY
            else self._seconds(Message(operation, size // parts, self._mesh.extent(axes)), axes)
            for operation, axes, parts in self._passed(held, wanted, entered, value.has_gradient)
        )

    def _passed(
        self, held: TensorLayout, wanted: TensorLayout, entered: Axes, has_gradient: bool
    ) -> tuple[_Passed, ...]:
        """Return the messages between two layouts, which inner dimensions that neither cuts do not change."""
        dims = [dim for dim, pair in enumerate(zip(held.split, wanted.split, strict=True)) if any(pair) or not dim]
        held, wanted = (TensorLayout(tuple(layout.split[dim] for dim in dims)) for layout in (held, wanted))
        key = (held, wanted, entered, has_gradient)
        if key not in self._messages:
            self._messages[key] = tuple(self._find_passed(*key))
        return self._messages[key]

    def _find_passed(
        self, layout: TensorLayout, wanted: TensorLayout, entered: Axes, has_gradient: bool
    ) -> Iterator[_Passed]:
        shape = (self._mesh.size,) * len(layout.split)
        whole = math.prod(shape)
        chain = [*plan_directly(Move(self._mesh, layout, wanted, shape, has_gradient)), None]
        for step in chain:
            if step is not None:
                collective, after = Collective(step.kind, step.axes, step.dim, step.from_dim), step.after(layout)
                if step.kind == "gather" and entered and set(step.axes) <= set(entered) and after == wanted:
                    entered = tuple(axis for axis in entered if axis not in step.axes)
                    collective = Collective("gather_enter", step.axes, step.dim)  # the way back is one reduce-scatter
            elif entered:
                collective, after = Collective("enter", entered), layout
            else:
                return
            spec = TensorSpec(layout.local_shape(self._mesh, shape), torch.int8)
            crossing = LocalCollective(collective, spec, has_gradient)
            for message in crossing.messages(self._mesh, self._mesh.first_rank):
                if message is not None:
                    yield message.operation, collective.axes, whole // message.bytes
            for copied in itertools.chain(*crossing.copies(self._mesh)):
                yield _COPY, (), whole // copied
            layout = after

    def _of_collective(self, crossing: LocalCollective, *, waits: bool) -> float:
        found, axes = crossing.messages(self._mesh, self._mesh.first_rank), crossing.collective.axes
        copies = map(self._copy_s, itertools.chain(*crossing.copies(self._mesh)))
        return sum(copies) + sum(self._seconds(each, axes, waits=waits) for each in found if each is not None)

    def _copy_s(self, nbytes: int) -> float:
        return copy_work(nbytes).seconds(self._device)

    def _seconds(self, message: Message, axes: Axes, *, waits: bool = True) -> float:
        return message_seconds(message.operation, message.bytes, self._mesh, axes, self._device, waits=waits)

    def _shared(self, message: Message, axes: Axes, stored: int) -> float:
        """Return the seconds of a parameter's message that shares a bucket with others, and their wait."""
        seconds, bucket = self._seconds(message, axes, waits=False), self._step.bucket_bytes
        if self._step.is_alone(stored):
            return seconds
        empty = message_seconds(message.operation, 0, self._mesh, axes, self._device, waits=False)
        share = 0.0 if bucket is None else min(1.0, stored / bucket)
        return max(0.0, seconds - (1.0 - share) * empty)
