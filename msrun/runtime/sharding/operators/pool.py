"""Rules for pooling: batch and channels are free; where the space is cut, parts exchange what their windows read.

MindSpore cuts the space only when windows do not overlap (kernel <= stride); that is the case without any exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from msrun.runtime.sharding.operators.rule import (
    Form,
    Label,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    dimension_labels,
    set_argument,
    sizes_of,
    summed_axes,
)
from msrun.runtime.sharding.operators.sliding import Sliding, floor_output, output_limit, per_dimension, read_windows

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


class PoolWithIndices(SpaceRule):
    """Pooling that also tells where each value was: a place in the whole space, which therefore stays whole."""

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels for the input and both results."""
        batch, space = self.labels(call)
        labels = (*batch, *space)
        return Form((labels,), labels, sizes_of((labels, call.shapes[0])), frozenset(space), (labels,))


RULES = [
    (Pool(1, fill=-math.inf), [aten.max_pool1d.default]),
    (Pool(2, fill=-math.inf), [aten.max_pool2d.default]),
    (Pool(3, fill=-math.inf), [aten.max_pool3d.default]),
    (Pool(1, fill=0.0), [aten.avg_pool1d.default]),
    (Pool(2, fill=0.0), [aten.avg_pool2d.default]),
    (Pool(3, fill=0.0), [aten.avg_pool3d.default]),
    (AdaptiveAverage(1), [aten.adaptive_avg_pool1d.default]),
    (AdaptiveAverage(2), [aten.adaptive_avg_pool2d.default]),
    (AdaptiveAverage(3), [aten.adaptive_avg_pool3d.default]),
    (PoolWithIndices(1), [aten.adaptive_max_pool1d.default, aten.max_pool1d_with_indices.default]),
    (PoolWithIndices(2), [aten.adaptive_max_pool2d.default, aten.max_pool2d_with_indices.default]),
    (PoolWithIndices(3), [aten.adaptive_max_pool3d.default, aten.max_pool3d_with_indices.default]),
]
