"""Rules for operators that join tensors or take one apart: cat, stack, split, chunk, unbind, glu, slice_scatter."""

from __future__ import annotations

import torch

from msrun.runtime.sharding.operators.rule import Form, Labels, OperatorCall, Rule, dimension_labels, sizes_of

aten = torch.ops.aten


class Join(Rule):
    """cat, concat and hstack: the dimension joined along stays whole, the others are cut alike in all inputs.

    Empty 1-D inputs join nothing: the keys of a cache that is still empty.
    """

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels; the joined dimension of several inputs has none, nor have empty 1-D ones."""
        shape = call.output_shape
        labels = dimension_labels("d", len(shape))
        if call.node.target is aten.hstack.default:
            dim = min(1, len(shape) - 1)
        else:
            dim = call.argument("dim", 0) % max(1, len(shape))
        joined = sum(given != (0,) for given in call.shapes) > 1
        free: Labels = tuple(None if joined and i == dim else label for i, label in enumerate(labels))
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
        dim = call.argument("dim", 0) % (len(shape) + 1)
        return Form((labels,) * len(call.shapes), (*labels[:dim], None, *labels[dim:]), sizes_of((labels, shape)))


class TakeApart(Rule):
    """split, chunk, tensor_split and glu: the dimension taken apart stays whole."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels of all results; the dimension taken apart has none."""
        shape = call.shapes[0]
        dim = call.argument("dim", 0) % max(1, len(shape))
        labels: Labels = tuple(None if i == dim else label for i, label in enumerate(dimension_labels("d", len(shape))))
        return Form((labels,), labels, sizes_of((labels, shape)), others=(labels,) * (len(call.output_shapes) - 1))


class Unbind(Rule):
    """unbind: as many results as the dimension is long, each without it."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return the labels of the other dimensions."""
        shape = call.shapes[0]
        dim = call.argument("dim", 0) % len(shape)
        labels: Labels = tuple(None if i == dim else label for i, label in enumerate(dimension_labels("d", len(shape))))
        output = labels[:dim] + labels[dim + 1 :]
        return Form((labels,), output, sizes_of((labels, shape)), others=(output,) * (len(call.output_shapes) - 1))


class ScatterPart(Rule):
    """slice_scatter and select_scatter, a tensor with one part replaced: the dimension of the part stays whole."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels of both tensors; the dimension of the part has none."""
        shape = call.shapes[0]
        dim = call.argument("dim") % len(shape)
        labels: Labels = tuple(None if i == dim else label for i, label in enumerate(dimension_labels("d", len(shape))))
        is_slice = call.node.target is aten.slice_scatter.default
        part = labels if is_slice else labels[:dim] + labels[dim + 1 :]
        return Form((labels, part), labels, sizes_of((labels, shape)))


RULES = [
    (Join(), [aten.cat.default, aten.concat.default, aten.concatenate.default, aten.hstack.default]),
    (Stack(), [aten.stack.default]),
    (
        TakeApart(),
        [
            aten.split.Tensor,
            aten.split.sizes,
            aten.split_with_sizes.default,
            aten.chunk.default,
            aten.tensor_split.sections,
            aten.tensor_split.indices,
            aten.unsafe_split.Tensor,
            aten.unsafe_chunk.default,
            aten.glu.default,
        ],
    ),
    (Unbind(), [aten.unbind.int]),
    (ScatterPart(), [aten.slice_scatter.default, aten.select_scatter.default]),
]
