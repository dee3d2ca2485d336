"""Rules for operators that only rearrange: reshape and its kin, permute, transpose, expand, unsqueeze, squeeze."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from msrun.runtime.sharding.operators.rule import (
    Form,
    Labels,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    Rules,
    aligned,
    dimension_labels,
    free_labels,
    sizes_of,
)
from msrun.runtime.sharding.sizes import common_divisor

aten = torch.ops.aten


def dimension_groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Match dimensions of two shapes of equal size: the smallest runs whose products are equal.

    (6, 4) and (2, 3, 4) give [([0], [0, 1]), ([1], [2])]. Dimensions of size 1 stand with their neighbours.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        left, right = [i] if i < len(source) else [], [j] if j < len(target) else []
        a = source[i] if left else 1
        b = target[j] if right else 1
        i, j = i + len(left), j + len(right)
        while a != b:
            if a < b:
                left.append(i)
                a *= source[i]
                i += 1
            else:
                right.append(j)
                b *= target[j]
                j += 1
        groups.append((left, right))
    return groups


def outermost_after_reshape(source: Sequence[int], target: Sequence[int], dim: int) -> int | None:
    """Return the dimension whose outermost index is that of dimension `dim` before; None where it is inside of another.

    A dimension of size 1 is there, too, as it would be with any other size.
    """
    for left, right in dimension_groups(source, target):
        if dim in left:
            is_outermost = right and all(source[i] == 1 for i in left if i < dim)
            return next((j for j in right if target[j] > 1), right[0]) if is_outermost else None
    return None


class _ToShape(Rule):
    """An operator that is given its result's shape: on a rank it is given the local one."""

    follows = True
    operator: Any

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Call the operator with the local shape."""
        shape = form.layout(form.output, split).local_shape(build.mesh, call.output_shape)
        return build.call(self.operator, inputs[0], list(shape))


class Reshape(_ToShape):
    """Of each run of dimensions that become a run of others only the first one longer than 1 may be split."""

    operator = aten.reshape.default

    def form(self, call: OperatorCall) -> Form:
        """Return one label per run; its size is what both sides can be cut into."""
        source, target = call.shapes[0], call.output_shape
        inputs: list[str | None] = [None] * len(source)
        output: list[str | None] = [None] * len(target)
        sizes = {}
        if 0 not in source:
            for number, (left, right) in enumerate(dimension_groups(source, target)):
                first_in = next((i for i in left if source[i] > 1), None)
                first_out = next((j for j in right if target[j] > 1), None)
                if first_in is not None and first_out is not None:
                    label = f"r{number}"
                    inputs[first_in] = output[first_out] = label
                    sizes[label] = common_divisor(source[first_in], target[first_out])
        return Form((tuple(inputs),), tuple(output), sizes)


class Expand(_ToShape):
    """Expanded dimensions come from nothing; the others keep their labels."""

    operator = aten.expand.default

    def form(self, call: OperatorCall) -> Form:
        """Return aligned labels; expanded input dimensions have none."""
        source, target = call.shapes[0], call.output_shape
        output = dimension_labels("d", len(target))
        return Form((aligned(output, target, source),), output, sizes_of((output, target)))


class Permute(Rule):
    """permute, transpose and t: labels move with their dimensions."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return the labels in their new order."""
        shape = call.shapes[0]
        labels = dimension_labels("d", len(shape))
        order = self._order(call, len(shape))
        return Form((labels,), tuple(labels[i] for i in order), sizes_of((labels, shape)))

    @staticmethod
    def _order(call: OperatorCall, ndim: int) -> list[int]:
        if call.node.target is aten.permute.default:
            return [dim % ndim for dim in call.argument("dims")]
        order = list(range(ndim))
        if call.node.target is aten.transpose.int:
            a, b = call.argument("dim0") % ndim, call.argument("dim1") % ndim
        else:  # t
            a, b = (0, 1) if ndim == 2 else (0, 0)
        order[a], order[b] = order[b], order[a]
        return order


RULES: Rules = [
    (
        Reshape(),
        [
            aten.flatten.using_ints,
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.unflatten.int,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
        ],
    ),
    (Expand(), [aten.expand.default]),
    (Permute(), [aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default]),
]


class Join(Rule):
    """cat, concat and hstack: the dimension joined along stays whole, the others are cut alike in all inputs.

    Empty 1-D inputs join nothing: the keys of a cache that is still empty.
    """

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels; the joined dimension of several inputs has none, nor have empty 1-D ones."""
        shape = call.output_shape
        is_row = call.node.target is aten.hstack.default
        dim = min(1, len(shape) - 1) if is_row else call.argument("dim") % len(shape)
        joined = sum(given != (0,) for given in call.shapes) > 1
        free = free_labels(len(shape), {dim} if joined else ())
        inputs = tuple(
            free if len(given) == len(shape) and given != (0,) else (None,) * len(given) for given in call.shapes
        )
        return Form(inputs, free, sizes_of((free, shape)))


class Stack(Rule):
    """stack: a new dimension, whole."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels and one more dimension."""
        shape = call.shapes[0]
        labels: Labels = dimension_labels("d", len(shape))
        dim = call.argument("dim") % (len(shape) + 1)
        return Form((labels,) * len(call.shapes), (*labels[:dim], None, *labels[dim:]), sizes_of((labels, shape)))


class ScatterPart(Rule):
    """slice_scatter and select_scatter, a tensor with one part replaced: the dimension of the part stays whole."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels of both tensors; the dimension of the part has none."""
        shape = call.shapes[0]
        dim = call.dimension()
        labels = free_labels(len(shape), {dim})
        is_slice = call.node.target is aten.slice_scatter.default
        part = labels if is_slice else labels[:dim] + labels[dim + 1 :]
        return Form((labels, part), labels, sizes_of((labels, shape)))


RULES += [
    (Join(), [aten.cat.default, aten.concat.default, aten.concatenate.default, aten.hstack.default]),
    (Stack(), [aten.stack.default]),
    (ScatterPart(), [aten.slice_scatter.default, aten.select_scatter.default]),
]
