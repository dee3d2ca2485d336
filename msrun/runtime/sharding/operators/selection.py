"""Rules for operators that take or move parts of a tensor by constants: select, slice, flip, roll, tril, repeat, ..."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from msrun.runtime.sharding.layout import Axes
from msrun.runtime.sharding.operators.along_split import AlongSome
from msrun.runtime.sharding.operators.rows import first_of_part
from msrun.runtime.sharding.operators.rule import (
    Form,
    Labels,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    dimension_labels,
    sizes_of,
)
from msrun.runtime.sharding.operators.shape import Permute

aten = torch.ops.aten


class SomeWhole(AlongSome):
    """An operator that moves or mixes what lies along some dimensions: the rows of the batch stay where they lie."""


class Slice(SomeWhole):
    """slice: a dimension that is taken from end to end is free."""

    def changed(self, call: OperatorCall) -> set[int]:
        """Return the sliced dimension, or nothing when all of it is taken."""
        return {dim for dim in call.dimensions() if call.shapes[0][dim] != call.output_shape[dim]}


def triangle(
    value: Tensor,
    place: Tensor,
    mesh_shape: tuple[int, ...],
    row_axes: Axes,
    column_axes: Axes,
    diagonal: int,
    is_upper: bool,
) -> Tensor:
    """Return this rank's part of tril or triu: column j of row i is kept by i - j of the whole tensor."""
    rows, columns = value.shape[-2:]
    shift = first_of_part(place, mesh_shape, row_axes, rows) - first_of_part(place, mesh_shape, column_axes, columns)
    return value.triu(diagonal + shift) if is_upper else value.tril(diagonal + shift)


class Triangle(Rule):
    """tril and triu: every dimension may be cut."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels."""
        labels = dimension_labels("d", len(call.shapes[0]))
        return Form((labels,), labels, sizes_of((labels, call.shapes[0])))

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Move the diagonal by where this rank's part begins."""
        rows, columns = (split.get(label or "", ()) for label in form.output[-2:])
        if not rows and not columns:
            return self.local_call(call, build, inputs)
        is_upper = call.node.target is aten.triu.default
        diagonal = call.argument("diagonal")
        return build.call(triangle, inputs[0], build.place(), build.mesh.shape, rows, columns, diagonal, is_upper)


class Repeat(Rule):
    """repeat and tile: dimensions that are repeated stay whole, new ones have no label."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return aligned labels."""
        source, target = call.shapes[0], call.output_shape
        offset = len(target) - len(source)
        labels: Labels = tuple(
            label if size == target[offset + i] else None
            for i, (label, size) in enumerate(zip(dimension_labels("d", len(source)), source, strict=True))
        )
        return Form((labels,), (*(None,) * offset, *labels), sizes_of((labels, source)))


class RepeatInterleave(Rule):
    """repeat_interleave by a number along a dimension: parts of the input give parts of the result."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels; without a dimension the input is flattened and only its first one may be cut."""
        shape = call.shapes[0]
        labels = dimension_labels("d", len(shape))
        if call.argument("dim") is not None:
            return Form((labels,), labels, sizes_of((labels, shape)))
        given: Labels = tuple(label if i == 0 else None for i, label in enumerate(labels))
        return Form((given,), labels[:1] or (None,), sizes_of((given, shape)))


class AnyPermute(Permute):
    """movedim, swapaxes, mT, ...: whatever only changes the order of dimensions."""

    @staticmethod
    def _order(call: OperatorCall, ndim: int) -> list[int]:
        """Return the order by asking the operator for the strides of a tensor whose strides are all different."""
        probe = torch.empty([2] * ndim, device="meta")
        rest = call.node.args[1:]
        assert callable(call.node.target)
        moved = call.node.target(probe, *rest, **call.node.kwargs)
        return [probe.stride().index(stride) for stride in moved.stride()]


class LikeInType(Rule):
    """new_zeros, new_ones, new_full, new_empty: the input gives only type and device, so any cut of it will do."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels of the input; the result has none."""
        labels = dimension_labels("d", len(call.shapes[0]))
        return Form((labels,), (None,) * len(call.output_shape), sizes_of((labels, call.shapes[0])))

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Make the whole; nothing is summed."""
        del form, split
        return self.local_call(call, build, inputs)


RULES = [
    (Slice(keeps=True), [aten.slice.Tensor, aten.narrow.default]),
    (
        SomeWhole(keeps=True),
        [
            aten.roll.default,
            aten.flip.default,
            aten.cumsum.default,
            aten.cumprod.default,
            aten.logcumsumexp.default,
            aten.diff.default,
        ],
    ),
    (Triangle(), [aten.tril.default, aten.triu.default]),
    (Repeat(), [aten.repeat.default, aten.tile.default]),
    (RepeatInterleave(), [aten.repeat_interleave.self_int]),
    (LikeInType(), [aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default]),
    (
        AnyPermute(),
        [
            aten.movedim.int,
            aten.movedim.intlist,
            aten.moveaxis.int,
            aten.moveaxis.intlist,
            aten.swapaxes.default,
            aten.swapdims.default,
            aten.mT.default,
            aten.adjoint.default,
        ],
    ),
]
