"""Rules for convolution and transposed convolution, 1d to 3d.

Batch, output channels, input channels (partial sums) and the space may be cut; the kernel never. With several groups
channels are cut between them. Where the space is cut, parts exchange the borders that their kernels read.
MindSpore's Conv2D allows the same cuts, the space only under conditions that the exchange of windows does not need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from msrun.runtime.sharding.collective import Collective, Window
from msrun.runtime.sharding.layout import Axes
from msrun.runtime.sharding.operators.pool import Sliding, per_dimension, read_windows
from msrun.runtime.sharding.operators.rule import (
    Form,
    Labels,
    LabelSplit,
    Limit,
    LocalBuilder,
    OperatorCall,
    Rule,
    dimension_labels,
    summed_axes,
)

aten = torch.ops.aten


class Convolution(Rule):
    """y[b, o, s] = sum over i and kernel of x[b, i, ..] w[o, i, ..] + bias[o]."""

    operators: Sequence[Any] = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)

    def form(self, call: OperatorCall) -> Form:
        """Return labels b, i and o (or g with several groups), s0, ..."""
        shape, weight = call.shapes[:2]
        space = dimension_labels("s", len(weight) - 2)
        batch = ("b",) if len(shape) == len(weight) else ()
        groups = call.argument("groups")
        given, made = ("i", "o") if groups == 1 else ("g", "g")
        x, y = (*batch, given, *space), (*batch, made, *space)
        inputs: list[Labels] = [x, self._weight(groups, len(space)), *((made,),) * (len(call.tensors) - 2)]
        sizes = dict(zip(x, shape, strict=True))
        channels = call.output_shape[len(batch)]
        sizes[made] = channels if groups == 1 else math.gcd(channels, shape[len(batch)])
        limits = {label: self._space_limit(call, dim) for dim, label in enumerate(space)}
        if groups > 1:
            limits["g"] = Limit(lambda parts: groups % parts == 0, f"in {groups} groups, which must stay whole")
        return Form(tuple(inputs), y, sizes, added=frozenset({2}), limits=limits)

    @staticmethod
    def _weight(groups: int, ndim: int) -> Labels:
        return ("o", "i", *(None,) * ndim) if groups == 1 else ("g", None, *(None,) * ndim)

    def _space_limit(self, call: OperatorCall, dim: int) -> Limit:
        return self._kernels(call)[dim].limit

    @staticmethod
    def _paddings(call: OperatorCall) -> list[tuple[int, int]]:
        """Return the padding before and behind every dimension."""
        kernel = call.shapes[1][2:]
        given = call.argument("padding")
        if given == "valid":
            return [(0, 0)] * len(kernel)
        if given == "same":
            dilation = per_dimension(call.argument("dilation"), len(kernel))
            totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            return [(total // 2, total - total // 2) for total in totals]
        return [(padding, padding) for padding in per_dimension(given, len(kernel))]

    def _kernels(self, call: OperatorCall) -> list[Sliding]:
        shape, kernel = call.shapes[0], call.shapes[1][2:]
        stride, dilation = (per_dimension(call.argument(name), len(kernel)) for name in ("stride", "dilation"))
        first = len(shape) - len(kernel)
        return [
            Sliding(shape[first + i], call.output_shape[first + i], d * (k - 1) + 1, s, before)
            for i, (k, s, d, (before, _)) in enumerate(zip(kernel, stride, dilation, self._paddings(call), strict=True))
        ]

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Widen cut dimensions, convolve, make partial sums whole, add the bias."""
        cuts = space_cuts(call, form, split)
        axes = summed_axes(form, split)
        bias = inputs[2] if len(inputs) > 2 else None
        y = self._local(call, build, inputs[0], inputs[1], None if axes else bias, cuts, _groups(call, build, split))
        y = build.sum_over(y, axes)
        if axes and bias is not None:
            y = build.call(aten.add.Tensor, y, build.call(aten.reshape.default, bias, [-1, *(1,) * len(cuts)]))
        return y

    def _local(
        self,
        call: OperatorCall,
        build: LocalBuilder,
        x: fx.Node,
        weight: fx.Node,
        bias: fx.Node | None,
        cuts: Sequence[Axes],
        groups: int,
    ) -> fx.Node:
        count = len(cuts)
        x = read_windows(build, x, len(call.shapes[0]) - count, self._kernels(call), cuts, 0.0)
        # a window has its padding
        paddings = [(0, 0) if cut else both for cut, both in zip(cuts, self._paddings(call), strict=True)]
        uneven = [behind - before for before, behind in paddings]
        if any(uneven):
            x = build.call(aten.constant_pad_nd.default, x, [n for extra in reversed(uneven) for n in (0, extra)])
        stride, dilation = (per_dimension(call.argument(name), count) for name in ("stride", "dilation"))
        even = [before for before, _ in paddings]
        return build.call(self.operators[count - 1], x, weight, bias, stride, even, dilation, groups)


class TransposedConvolution(Convolution):
    """A convolution's gradient by its input, w[i, o, ..]; the space is cut when the output is `stride` times it."""

    operators = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)

    @staticmethod
    def _weight(groups: int, ndim: int) -> Labels:
        return ("i", "o", *(None,) * ndim) if groups == 1 else ("g", None, *(None,) * ndim)

    def _space_limit(self, call: OperatorCall, dim: int) -> Limit:
        first = len(call.shapes[0]) - len(call.shapes[1]) + 2
        size, output = (shape[first + dim] for shape in (call.shapes[0], call.output_shape))
        stride = per_dimension(call.argument("stride"), len(call.shapes[1]) - 2)[dim]
        return Limit(lambda _: output == size * stride, f"and its output {output}, which is not {stride} times that")

    def _local(
        self,
        call: OperatorCall,
        build: LocalBuilder,
        x: fx.Node,
        weight: fx.Node,
        bias: fx.Node | None,
        cuts: Sequence[Axes],
        groups: int,
    ) -> fx.Node:
        """Output o gets inputs (o + padding - extent + 1) / stride to (o + padding) / stride: convolve all of them
        without padding, keep the outputs that are this rank's."""
        count, shape = len(cuts), call.shapes[0]
        first = len(shape) - count
        names = ("stride", "padding", "output_padding", "dilation")
        stride, padding, output_padding, dilation = (per_dimension(call.argument(name), count) for name in names)
        kept: list[tuple[int, int, int]] = []
        for dim, axes in enumerate(cuts):
            if not axes:
                continue
            own = shape[first + dim] // build.mesh.extent(axes)
            s, p, extent = stride[dim], padding[dim], dilation[dim] * (call.shapes[1][2 + dim] - 1) + 1
            below, above = max(0, (extent - 1 - p) // s), max(0, (p - 1) // s + 1)
            if below or above:
                window = Window(shape[first + dim], own, -below, own + below + above)
                x = build.collective(Collective("halo", axes, first + dim, window=window), x)
            kept.append((first + dim, p + below * s, own * s))
            padding[dim] = 0
            output_padding[dim] = max(0, p - extent + s - above * s)
        y = build.call(self.operators[count - 1], x, weight, bias, stride, padding, output_padding, groups, dilation)
        for place, start, length in kept:
            y = build.call(aten.narrow.default, y, place, start, length)
        return y


def space_cuts(call: OperatorCall, form: Form, split: LabelSplit) -> list[Axes]:
    """Return the axes that cut each dimension of the space."""
    labels = form.inputs[0][len(call.shapes[0]) - (len(call.shapes[1]) - 2) :]
    return [split.get(label or "", ()) for label in labels]


def _groups(call: OperatorCall, build: LocalBuilder, split: LabelSplit) -> int:
    return int(call.argument("groups")) // build.mesh.extent(split.get("g", ()))


RULES = [
    (
        Convolution(),
        [
            aten.conv1d.default,
            aten.conv1d.padding,
            aten.conv2d.default,
            aten.conv2d.padding,
            aten.conv3d.default,
            aten.conv3d.padding,
        ],
    ),
    (
        TransposedConvolution(),
        [aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input],
    ),
]
