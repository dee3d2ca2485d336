"""Rules for operators that make the space larger or smaller: interpolation, padding, pixel shuffle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from msrun.runtime.sharding.operators.pool import SpaceRule
from msrun.runtime.sharding.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    dimension_labels,
    set_argument,
    sizes_of,
)
from msrun.runtime.sharding.operators.sliding import output_limit

aten = torch.ops.aten


class Nearest(SpaceRule):
    """Nearest-neighbour interpolation: a dimension that grows or shrinks by a whole factor may be cut."""

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels, whole where the factor is not a whole number."""
        batch, space = self.labels(call)
        factors = call.argument("scale_factors") or [made / size for size, made in self.space(call)]
        limits, whole = {}, set()
        for label, (size, made), factor in zip(space, self.space(call), factors, strict=True):
            limits[label] = output_limit(made)
            if (made % size and size % made) or size * factor != made:
                whole.add(label)
        labels = (*batch, *space)
        return Form((labels,), labels, sizes_of((labels, call.shapes[0])), frozenset(whole), limits=limits)

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Ask for the local size where a size was given."""
        node = self.local_call(call, build, inputs)
        if call.argument("output_size") is not None:
            shape = form.layout(form.output, split).local_shape(build.mesh, call.output_shape)
            set_argument(node, "output_size", list(shape[-self.ndim :]))
        return node


class Interpolation(SpaceRule):
    """Linear and cubic interpolation: the space stays whole."""

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels."""
        batch, space = self.labels(call)
        labels = (*batch, *space)
        return Form((labels,), labels, sizes_of((labels, call.shapes[0])), frozenset(space))


class PixelShuffle(SpaceRule):
    """pixel_shuffle: blocks of r * r channels become r times more rows and columns."""

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels; channels are cut between blocks."""
        batch, space = self.labels(call)
        labels = (*batch, *space)
        limits = {batch[-1]: output_limit(call.output_shape[-self.ndim - 1])}
        return Form((labels,), labels, sizes_of((labels, call.shapes[0])), limits=limits)


class Padding(Rule):
    """pad with a constant, by reflection or replication: dimensions that are padded stay whole."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels; the padding is listed from the last dimension on, two numbers each."""
        labels = dimension_labels("d", len(call.shapes[0]))
        padding = call.argument("pad")
        whole = {labels[-1 - i // 2] for i, rows in enumerate(padding) if rows}
        return Form((labels,), labels, sizes_of((labels, call.shapes[0])), frozenset(whole))


RULES = [
    (Nearest(1), [aten.upsample_nearest1d.vec, aten._upsample_nearest_exact1d.vec]),
    (Nearest(2), [aten.upsample_nearest2d.vec, aten._upsample_nearest_exact2d.vec]),
    (Nearest(3), [aten.upsample_nearest3d.vec, aten._upsample_nearest_exact3d.vec]),
    (Interpolation(1), [aten.upsample_linear1d.vec]),
    (Interpolation(2), [aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec]),
    (Interpolation(3), [aten.upsample_trilinear3d.vec]),
    (Padding(), [aten.pad.default, aten.constant_pad_nd.default]),
    (PixelShuffle(2), [aten.pixel_shuffle.default]),
]
