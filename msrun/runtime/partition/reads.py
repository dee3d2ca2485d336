"""Values in the layouts in which operators read them: moved once, from the nearest layout that they have already."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import fx

from msrun.errors import StrategyError
from msrun.runtime.capture.assignment import Assignment, LayoutConstraint
from msrun.runtime.capture.batch_rows import rows_of_result
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.partition.program import Read, Redistribution, Use
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes, Mesh, Move, TensorLayout, assign_axes, plan_redistribution
from msrun.runtime.sharding.named_layout import Layout
from msrun.runtime.sharding.operators.rule import operator_call
from msrun.runtime.sharding.strategies import Entry, entry_numbers


def entry_layout(
    entry: Entry,
    shape: tuple[int, ...],
    mesh: Mesh,
    *,
    what: str,
    near: TensorLayout | None = None,
    order: Sequence[int] | None = None,
) -> TensorLayout:
    """Return the layout that a user's entry means for a tensor.

    Args:
        near, order: which axes numbers prefer, as in `assign_axes`.
    """
    numbers = entry_numbers(entry, mesh)
    if len(numbers) != len(shape):
        raise StrategyError(
            f"{what}: {entry} has {len(numbers)} numbers for {len(shape)} dimensions; give one for each"
        )
    for dim, (number, size) in enumerate(zip(numbers, shape, strict=True)):
        if size % number:
            legal = max(n for n in range(1, number + 1) if size % n == 0 and mesh.size % n == 0)
            raise StrategyError(
                f"{what}: dimension {dim} has size {size}, which {number} does not divide; "
                f"the nearest legal entry is {(*numbers[:dim], legal, *numbers[dim + 1 :])}"
            )
    if isinstance(entry, Layout):
        return entry.resolve(mesh)
    return TensorLayout(assign_axes(mesh, numbers, what=what, near=near, order=order))


def layouts_of_outputs(captured: CapturedGraph, mesh: Mesh, axes: Axes) -> list[TensorLayout | None]:
    """Return how each result of a step leaves it: the rows of the batch cut by `axes`, everything else whole.

    None: no value. What the call stores in attributes is whole as well.
    """
    inputs = [node for node in captured.graph.nodes if node.op == "placeholder" and node.name in captured.inputs]
    rows = [node.meta["val"].shape[0] for node in inputs if node.meta["val"].dim()]

    def layout(index: int, node: fx.Node) -> TensorLayout:
        shape = node.meta["val"].shape
        dim = None if index in captured.stored or not axes else rows_of_result(node, rows)
        if dim is None or shape[dim] % mesh.extent(axes):
            return TensorLayout.replicated(len(shape))
        return TensorLayout(tuple(axes if each == dim else () for each in range(len(shape))))

    return [layout(i, value) if isinstance(value, fx.Node) else None for i, value in enumerate(captured.outputs)]


def layout_of_result(
    constraint: LayoutConstraint, shape: tuple[int, ...], mesh: Mesh, held: TensorLayout, summed: Axes
) -> TensorLayout:
    """Return the layout that a mark asks for: with the axes that the value has and, next, those of its partial sums.

    So MatMul ((A, B), (B, C)) with out_strategy (A * B, C) cuts its rows by the very axes that it sums over.
    """
    side = "out_strategy" if constraint.leaves else "in_strategy"
    near = held
    if not isinstance(constraint.entry, Layout) and len(constraint.entry) == len(shape):
        near = _with_summed(constraint.entry, mesh, held, summed)
    return entry_layout(constraint.entry, shape, mesh, what=f"{side} of {constraint.name}", near=near)


def _with_summed(numbers: tuple[int, ...], mesh: Mesh, held: TensorLayout, summed: Axes) -> TensorLayout:
    rest = [axis for axis in summed if axis not in held.used]  # a sum may have been left cut by some of its axes
    split = []
    for number, axes in zip(numbers, held.split, strict=True):
        cut = axes
        for axis in tuple(rest):
            if number % mesh.extent((*cut, axis)) == 0:
                cut = (*cut, axis)
                rest.remove(axis)
        split.append(cut)
    return TensorLayout(tuple(split))


class Reads:
    """Decides how values come to their readers. Owned by `decide`."""

    def __init__(self, mesh: Mesh, differentiable: Set[fx.Node]) -> None:
        self._mesh = mesh
        self._differentiable = differentiable
        self._held: dict[fx.Node, list[TensorLayout]] = {}
        """captured node -> the layouts that it has been brought to"""
        self._made: set[tuple[fx.Node, TensorLayout, str]] = set()
        """(captured node, its layout, collective): two readers of one value share its redistribution"""
        self._readers: dict[tuple[fx.Node, TensorLayout], dict[object, Collective | None]] = {}
        """(captured node, its layout) -> who takes it so: collectives, and operators (None)"""
        self.redistributions: list[Redistribution] = []

    def hold(self, node: fx.Node, layout: TensorLayout) -> None:
        """Say in which layout a captured node's value is."""
        self._held.setdefault(node, [layout])

    def bring(
        self,
        node: fx.Node,
        target: TensorLayout,
        entered: Axes,
        *,
        by: object,
        reader: str,
        kept_axes: Axes = (),
        asked: bool = False,
        producer: str = "",
    ) -> Read:
        """Return how a value comes to a layout, from the nearest one that it has already.

        Args:
            entered: axes along which the reader leaves partial sums of its gradient.
            by: who reads it.
            kept_axes: axes that no move may use; nor may the value be taken from where it is cut along them.
            reader, producer, asked: for the list of redistributions.
        """
        value = node.meta["val"]
        held = [layout for layout in self._held[node] if not layout.used & set(kept_axes)]
        moves = [
            Move(self._mesh, layout, target, tuple(value.shape), node in self._differentiable, kept_axes)
            for layout in held
        ]
        chains = [plan_redistribution(move) for move in moves]
        best = min(range(len(moves)), key=lambda i: moves[i].total_elements(chains[i]))
        steps: list[tuple[Collective, TensorLayout | None]] = []
        layout, is_new = held[best], False
        for index, step in enumerate(chains[best]):
            after = step.after(layout)
            assert after.fits(self._mesh, value.shape), "of every size that the program is for"
            if index == len(chains[best]) - 1 and step.kind == "gather" and entered and set(step.axes) <= set(entered):
                # gather then enter along the same axes: the way back is one reduce-scatter
                steps.append((Collective("gather_enter", step.axes, step.dim), None))
                entered = tuple(axis for axis in entered if axis not in step.axes)
            else:
                steps.append((Collective(step.kind, step.axes, step.dim, step.from_dim), after))
                if after not in self._held[node]:
                    self._held[node].append(after)
            is_new |= self._take(node, layout, steps[-1][0])
            layout = after
        if is_new:
            moved_bytes = moves[best].total_elements(chains[best]) * value.dtype.itemsize
            ends = held[best].numbers(self._mesh), target.numbers(self._mesh)
            producer = producer or _describe(node)
            self.redistributions.append(Redistribution(producer, reader, *ends, moved_bytes, asked))
        if entered:
            steps.append((Collective("enter", entered), None))
            if len(steps) == 1:
                self._take(node, layout, steps[-1][0])
        if not steps:
            self._readers.setdefault((node, layout), {})[by] = None
        return Read(node.name, held[best], tuple(steps))

    def cut_by_all_readers(self, node: fx.Node, layout: TensorLayout) -> Collective | None:
        """Return the slice through which alone a value is read; None when there are other readers, or none."""
        readers = list(self._readers.get((node, layout), {}).values())
        only = readers[0] if len(readers) == 1 else None
        return only if only is not None and only.kind == "slice" else None

    def _take(self, node: fx.Node, layout: TensorLayout, collective: Collective) -> bool:
        """Note that a value passes a collective; returns whether it does so for the first time."""
        key = (node, layout, str(collective))
        self._readers.setdefault((node, layout), {})[str(collective)] = collective
        is_new = key not in self._made
        self._made.add(key)
        return is_new


def scatter_of(collective: Collective, summed: Axes) -> tuple[int, Axes] | None:
    """Return the dimension and axes by which a sum is left cut that is only read through this slice.

    A reduce-scatter moves half of what an all-reduce does.

    Args:
        summed: axes over which the sum goes.
    """
    axes = tuple(itertools.takewhile(frozenset(summed).__contains__, collective.axes))
    return (collective.dim, axes) if axes else None


def _describe(node: fx.Node) -> str:
    return describe_operator(node) if node.op == "call_function" else f"input {node.name}"


def describe_operator(node: fx.Node) -> str:
    """Return what a captured operator is and where it was called."""
    name = str(node.target).removesuffix(".default")
    return f"{name} in module {operator_call(node).module_path or '(top)'}"


@dataclass
class _Read:
    """One parameter during a walk over the graph."""

    name: str
    node: fx.Node
    uses: list[Use]
    """The different ways in which operators read it, in order."""
    stored: Use | None = None


class ParameterUses:
    """Decides how parameters are stored and read. Owned by `decide`."""

    def __init__(
        self,
        reads: Reads,
        mesh: Mesh,
        assignment: Assignment,
        stored: Mapping[str, TensorLayout],
        decided: Mapping[str, Use],
    ) -> None:
        """Args:
        stored: parameter name -> layout in which it is stored since an earlier call.
        decided: parameter name -> how an earlier walk found that it is stored best.
        """
        self._values = reads
        self._mesh = mesh
        self._assignment = assignment
        self._fixed = dict(stored)
        self._planned: dict[str, TensorLayout] = {}
        self._decided = decided
        self._reads: dict[fx.Node, _Read] = {}
        self._marked: dict[str, TensorLayout] = {}

    def mark(self, name: str, layout: TensorLayout) -> None:
        """Say how the user lays out what enters or leaves a region, by the name of its captured mark."""
        self._marked[name] = layout

    def add(self, node: fx.Node, name: str) -> None:
        """Say which captured placeholder is which parameter.

        A tied parameter may have several placeholders; all of them are read as the first one.
        """
        known = next((read for read in self._reads.values() if read.name == name), None)
        self._reads[node] = known or _Read(name, node, [])

    def layout_of(self, node: fx.Node) -> TensorLayout | None:
        """Return the layout that the user planned, or of the first use; None before that."""
        self._read_plan(node)
        read = self._reads[node]
        return self._planned.get(read.name) or (read.uses[0].layout if read.uses else None)

    def read(self, node: fx.Node, use: Use, *, by: object, reader: str) -> Read:
        """Return how one operator reads a parameter."""
        self._read_plan(node)
        read = self._reads[node]
        if use not in read.uses:
            read.uses.append(use)
        if read.stored is None:
            read.stored = self._decided.get(read.name) or self._choose(read)
            self._values.hold(read.node, read.stored.layout)
        kept = tuple(axis for axis in read.stored.partial_axes if axis in use.partial_axes)
        rest = tuple(axis for axis in use.partial_axes if axis not in kept)
        producer = f"parameter {read.name}"
        return self._values.bring(read.node, use.layout, rest, by=by, reader=reader, kept_axes=kept, producer=producer)

    def finished(self) -> dict[str, Use]:
        """Return how every parameter is stored; whole when no operator has read it."""
        return {
            read.name: read.stored or Use(TensorLayout.replicated(read.node.meta["val"].dim()), ())
            for read in self._reads.values()
        }

    @property
    def placeholders(self) -> dict[str, str]:
        """Placeholder of a parameter -> the first placeholder of that parameter."""
        return {node.name: read.node.name for node, read in self._reads.items()}

    def better_storage(self) -> dict[str, Use]:
        """Return the parameters that are stored better in another way, now that all their uses are known."""
        best = {
            read.name: (self._choose(read), read.stored) for read in self._reads.values() if read.stored is not None
        }
        return {name: chosen for name, (chosen, present) in best.items() if chosen != present}

    def _choose(self, read: _Read) -> Use:
        fixed = self._fixed.get(read.name) or self._planned.get(read.name)
        return choose_storage(self._mesh, read.node, read.uses, fixed)

    def _read_plan(self, node: fx.Node) -> None:
        """Read the user's plan for a parameter at its first use: by then the inputs of its region have their axes."""
        name = self._reads[node].name
        if name not in self._assignment.parameters or name in self._planned:
            return
        entry, marks = self._assignment.parameters[name]
        taken = {axis for mark in marks if mark in self._marked for axis in self._marked[mark].used}
        order = sorted(self._mesh.axes, key=lambda axis: (axis in taken, axis))
        shape = tuple(node.meta["val"].shape)
        self._planned[name] = entry_layout(entry, shape, self._mesh, what=f"parameter_plan of {name}", order=order)


def choose_storage(mesh: Mesh, node: fx.Node, uses: Sequence[Use], fixed: TensorLayout | None) -> Use:
    """Return how to store a parameter so that its uses receive the fewest bytes; the first one where that is equal.

    Args:
        node: its captured placeholder.
        uses: the different ones, in order.
        fixed: the layout that it must have, because it is stored already or the user says so.
    """
    layouts = [fixed] if fixed is not None else list(dict.fromkeys(use.layout for use in uses))
    choices = [Use(layout, _common_partial(layout, uses)) for layout in layouts]
    return min(choices, key=lambda stored: _elements(mesh, node, stored, uses))


def _common_partial(layout: TensorLayout, uses: Sequence[Use]) -> Axes:
    common = set.intersection(*(set(use.partial_axes) for use in uses)) - layout.used
    return tuple(sorted(common))


def _elements(mesh: Mesh, node: fx.Node, stored: Use, uses: Sequence[Use]) -> int:
    """Return how many elements a rank receives for all uses and for the gradient's sum."""
    value = node.meta["val"]
    shape = tuple(value.shape)
    total = _summed(mesh, shape, stored.layout, stored.partial_axes)
    for use in uses:
        move = Move(mesh, stored.layout, use.layout, shape, value.requires_grad, stored.partial_axes)
        own = tuple(axis for axis in use.partial_axes if axis not in stored.partial_axes)
        total += move.total_elements(plan_redistribution(move)) + _summed(mesh, shape, use.layout, own)
    return total


def _summed(mesh: Mesh, shape: tuple[int, ...], layout: TensorLayout, axes: Axes) -> int:
    """Return what a rank receives for an all-reduce of its part."""
    parts = mesh.extent(axes)
    return 2 * math.prod(layout.local_shape(mesh, shape)) * (parts - 1) // parts
