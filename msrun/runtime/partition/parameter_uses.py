"""How a parameter is stored that several operators read, perhaps each in another layout: tied weights.

It is stored as one of its uses wants it, and redistributed for the others. Its gradient leaves in one message at the
end of the step, summed over the axes along which every use leaves partial sums; a use with more of them sums those
itself, on the way back through an `enter` collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from msrun.runtime.capture.assignment import Assignment
from msrun.runtime.partition.decisions import Read, Use
from msrun.runtime.partition.layout_constraints import entry_layout
from msrun.runtime.partition.reads import Reads
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout
from msrun.runtime.sharding.redistribution import Move, plan_redistribution


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
