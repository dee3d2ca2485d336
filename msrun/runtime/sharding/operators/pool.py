"""Rules for pooling: batch and channels are free; where the space is cut, parts exchange what their windows read.

MindSpore cuts the space only when windows do not overlap (kernel <= stride); that is the case without any exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from msrun.runtime.sharding.collective import Collective, Window
from msrun.runtime.sharding.layout import Axes
from msrun.runtime.sharding.operators.rule import (
    Form,
    Label,
    LabelSplit,
    Limit,
    LocalBuilder,
    OperatorCall,
    Rule,
    Rules,
    dimension_labels,
    set_argument,
    sizes_of,
    summed_axes,
)


@dataclass(frozen=True)
class Sliding:
    """A kernel on one dimension.

    Output o reads inputs o * stride - before to o * stride - before + extent - 1; those outside the tensor are padding.
    """

    size: int
    output: int
    extent: int
    """Kernel size with its dilation: dilation * (kernel - 1) + 1."""
    stride: int
    before: int
    """Padding in front."""

    @property
    def limit(self) -> Limit:
        """Input and output are cut alike."""
        return output_limit(self.output)

    def window(self, parts: int) -> Window | None:
        """Return what each part's outputs read; None when that is in its own part of the input."""
        own, outputs = self.size // parts, self.output // parts
        length = (outputs - 1) * self.stride + self.extent
        if self.before == 0 and outputs * self.stride == own and length <= own:
            return None
        return Window(self.size, outputs * self.stride, -self.before, length)


def output_limit(output: int) -> Limit:
    """Return the condition that the output can be cut like the input."""
    return Limit(
        lambda parts: output % parts == 0, f"but its output has size {output}, which must be cut into as many parts"
    )


def read_windows(
    build: LocalBuilder, x: fx.Node, first: int, kernels: Sequence[Sliding], cuts: Sequence[Axes], fill: float
) -> fx.Node:
    """Return the input with what its outputs read beyond this rank's part; dimensions one after the other, for corners.

    Args:
        first: the dimension of the first kernel.
        cuts: axes that cut each dimension.
        fill: what stands for padding.
    """
    for dim, (kernel, axes) in enumerate(zip(kernels, cuts, strict=True), first):
        window = kernel.window(build.mesh.extent(axes)) if axes else None
        if window is not None:
            filled = Window(window.size, window.step, window.offset, window.length, fill)
            x = build.collective(Collective("halo", axes, dim, window=filled), x)
    return x


def per_dimension(value: Any, count: int) -> list[int]:
    """Return one number for each dimension from a number or a list of one or of all."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * count if len(numbers) == 1 else numbers


def floor_output(size: int, extent: int, stride: int, padding: int) -> int:
    """Return the outputs of a kernel with this padding on both sides."""
    return math.floor((size + 2 * padding - extent) / stride) + 1


aten = torch.ops.aten


class SpaceRule(Rule):
    """An operator on the last `ndim` dimensions of one input; those before them are free."""

    follows = True

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim

    def labels(self, call: OperatorCall) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the labels n0, ... before the space, and those of the space: s0, ..."""
        return dimension_labels("n", len(call.shapes[0]) - self.ndim), dimension_labels("s", self.ndim)

    def space(self, call: OperatorCall) -> list[tuple[int, int]]:
        """Return size and output of every dimension of the space."""
        return list(zip(call.shapes[0][-self.ndim :], call.output_shape[-self.ndim :], strict=True))


class Pool(SpaceRule):
    """max_pool and avg_pool."""

    def __init__(self, ndim: int, *, fill: float) -> None:
        """`fill`: what stands for padding."""
        super().__init__(ndim)
        self._fill = fill

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels; the space is whole where the last window is smaller than the others (ceil_mode), where
        an average does not count its padding, and for whole numbers, which have no value to stand for padding."""
        labels = sum(self.labels(call), ())
        kernels = self._kernels(call)
        limits = {f"s{dim}": kernel.limit for dim, kernel in enumerate(kernels)}
        whole = frozenset[str]() if self._has_equal_windows(call, kernels) else frozenset(limits)
        return Form((labels,), labels, sizes_of((labels, call.shapes[0])), whole, limits=limits)

    def _kernels(self, call: OperatorCall) -> list[Sliding]:
        kernel, padding = (per_dimension(call.argument(name), self.ndim) for name in ("kernel_size", "padding"))
        stride = per_dimension(call.argument("stride") or kernel, self.ndim)
        dilation = per_dimension(call.argument("dilation", 1), self.ndim)
        return [
            Sliding(size, output, dilation[dim] * (kernel[dim] - 1) + 1, stride[dim], padding[dim])
            for dim, (size, output) in enumerate(self.space(call))
        ]

    @staticmethod
    def _has_equal_windows(call: OperatorCall, kernels: Sequence[Sliding]) -> bool:
        is_padded = any(kernel.before for kernel in kernels)
        if is_padded and not call.argument("count_include_pad", default=True):
            return False
        if not call.tensors[0].meta["val"].is_floating_point():
            return False
        return all(k.output == floor_output(k.size, k.extent, k.stride, k.before) for k in kernels)

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Widen cut dimensions, then pool without padding there."""
        kernels = self._kernels(call)
        cuts = [split.get(label or "", ()) for label in form.output[-self.ndim :]]
        x = read_windows(build, inputs[0], len(call.shapes[0]) - self.ndim, kernels, cuts, self._fill)
        node = self.local_call(call, build, [x])
        if any(cuts):
            padding = [0 if cut else kernel.before for cut, kernel in zip(cuts, kernels, strict=True)]
            set_argument(node, "padding", padding)
            set_argument(node, "ceil_mode", value=False)  # makes no difference here, but might to a part
        return node


class AdaptiveAverage(SpaceRule):
    """adaptive_avg_pool: a dimension averaged to one number is summed over, one in equal windows cut between them."""

    def form(self, call: OperatorCall) -> Form:
        """Return labels; those averaged to one number are missing in the output."""
        batch, space = self.labels(call)
        output: list[Label] = []
        limits, whole = {}, set()
        for label, (size, made) in zip(space, self.space(call), strict=True):
            output.append(None if made == 1 else label)
            if size % made:
                whole.add(label)
            elif made > 1:
                limits[label] = output_limit(made)
        labels = (*batch, *space)
        sizes = sizes_of((labels, call.shapes[0]))
        return Form((labels,), (*batch, *output), sizes, frozenset(whole), limits=limits)

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Pool to the local size; the mean of equal parts' means is the mean."""
        node = self.local_call(call, build, inputs)
        shape = form.layout(form.output, split).local_shape(build.mesh, call.output_shape)
        set_argument(node, "output_size", list(shape[-self.ndim :]))
        axes = summed_axes(form, split)
        if axes:
            node = build.call(aten.div.Scalar, node, build.mesh.extent(axes))
        return build.sum_over(node, axes)


class WholeSpace(SpaceRule):
    """Linear and cubic interpolation, and pooling that also tells where each value was: a place in the whole space."""

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels for the input and all results."""
        batch, space = self.labels(call)
        labels = (*batch, *space)
        others = (labels,) * (len(call.output_shapes) - 1)
        return Form((labels,), labels, sizes_of((labels, call.shapes[0])), frozenset(space), others)


RULES: Rules = [
    (Pool(1, fill=-math.inf), [aten.max_pool1d.default]),
    (Pool(2, fill=-math.inf), [aten.max_pool2d.default]),
    (Pool(3, fill=-math.inf), [aten.max_pool3d.default]),
    (Pool(1, fill=0.0), [aten.avg_pool1d.default]),
    (Pool(2, fill=0.0), [aten.avg_pool2d.default]),
    (Pool(3, fill=0.0), [aten.avg_pool3d.default]),
    (AdaptiveAverage(1), [aten.adaptive_avg_pool1d.default]),
    (AdaptiveAverage(2), [aten.adaptive_avg_pool2d.default]),
    (AdaptiveAverage(3), [aten.adaptive_avg_pool3d.default]),
    (WholeSpace(1), [aten.adaptive_max_pool1d.default, aten.max_pool1d_with_indices.default]),
    (WholeSpace(2), [aten.adaptive_max_pool2d.default, aten.max_pool2d_with_indices.default]),
    (WholeSpace(3), [aten.adaptive_max_pool3d.default, aten.max_pool3d_with_indices.default]),
]


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


RULES += [
    (Nearest(1), [aten.upsample_nearest1d.vec, aten._upsample_nearest_exact1d.vec]),
    (Nearest(2), [aten.upsample_nearest2d.vec, aten._upsample_nearest_exact2d.vec]),
    (Nearest(3), [aten.upsample_nearest3d.vec, aten._upsample_nearest_exact3d.vec]),
    (WholeSpace(1), [aten.upsample_linear1d.vec]),
    (WholeSpace(2), [aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec]),
    (WholeSpace(3), [aten.upsample_trilinear3d.vec]),
    (Padding(), [aten.pad.default, aten.constant_pad_nd.default]),
    (PixelShuffle(2), [aten.pixel_shuffle.default]),
]
