"""Kernels that slide along a dimension, as those of convolution and pooling: which parts they read when it is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.halo import Window
from msrun.runtime.sharding.layout import Axes
from msrun.runtime.sharding.operators.rule import Limit, LocalBuilder


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
