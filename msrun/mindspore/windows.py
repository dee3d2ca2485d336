"""Windows over images: MindSpore's pad modes of convolutions and pools in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msrun.errors import UsageError

Size = int | Sequence[int]
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
AVERAGES = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
LARGEST = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


def sizes_of(size: Size, dims: int) -> tuple[int, ...]:
    """Return one number per dimension; of MindSpore's (1, 1, h, w) the last ones."""
    return (size,) * dims if isinstance(size, int) else tuple(size)[-dims:] if len(size) > 1 else tuple(size) * dims


def sides_of(padding: Size, dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what is added before and after each dimension, of one number, one a dimension, or two a dimension."""
    if isinstance(padding, int):
        return (padding,) * dims, (padding,) * dims
    sides = tuple(padding)
    if len(sides) == 2 * dims:
        return sides[::2], sides[1::2]
    return sizes_of(sides, dims), sizes_of(sides, dims)


def check_padding(name: str, pad_mode: str, padding: Size) -> str:
    """Return the pad mode in lower case.

    Raises:
        UsageError: another pad mode, or `padding` without "pad".
    """
    mode = pad_mode.lower() if isinstance(pad_mode, str) else pad_mode
    if mode not in ("same", "valid", "pad"):
        raise UsageError(f"{name}(pad_mode={pad_mode!r}): one of same, valid, pad")
    if mode != "pad" and any([padding] if isinstance(padding, int) else padding):
        raise UsageError(f'{name}(pad_mode={pad_mode!r}, padding={padding!r}): padding needs pad_mode="pad"')
    return mode


def check_format(name: str, data_format: str) -> None:
    """Raise a UsageError for another order of dimensions than (n, c, ...)."""
    if data_format not in ("NCHW", "NCDHW"):
        raise UsageError(f"{name}(data_format={data_format!r}): NCHW; transpose the images with (0, 3, 1, 2)")


def pad_same(images: Tensor, kernel: Any, stride: Any, dilation: Any, value: float) -> Tensor:
    """Pad so that there are ceil(size / stride) windows; the odd row and column come last, as in MindSpore."""
    edges: list[int] = []
    for size, window, step, spread in zip(images.shape[2:], kernel, stride, dilation, strict=True):
        whole = max((-(-size // step) - 1) * step + (window - 1) * spread + 1 - size, 0)
        edges = [whole // 2, whole - whole // 2, *edges]
    return F.pad(images, edges, value=value) if any(edges) else images


def pad_sides(images: Tensor, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Tensor:
    """Add rows and columns before and after the last dimensions."""
    edges = [edge for sides in zip(reversed(before), reversed(after), strict=True) for edge in sides]
    return F.pad(images, edges, value=value) if any(edges) else images


def convolve(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    pad_mode: str = "valid",
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution of (n, c, ...) with MindSpore's pad modes."""
    dims = images.dim() - 2
    mode = check_padding(f"conv{dims}d", pad_mode, padding)
    steps, spread = sizes_of(stride, dims), sizes_of(dilation, dims)
    if mode == "same":
        images = pad_same(images, weight.shape[2:], steps, spread, 0.0)
    elif mode == "pad":
        before, after = sides_of(padding, dims)
        if before == after:
            return CONVOLUTIONS[dims - 1](images, weight, bias, steps, before, spread, groups)
        images = pad_sides(images, before, after)
    return CONVOLUTIONS[dims - 1](images, weight, bias, steps, 0, spread, groups)


def pool_largest(images: Tensor, kernel_size: Size = 1, strides: Size = 1, pad_mode: str = "valid") -> Tensor:
    """The largest of each window of (n, c, ...)."""
    images, kernel, steps = _pooled(images, kernel_size, strides, pad_mode, float("-inf"))
    return LARGEST[images.dim() - 3](images, kernel, steps)


def pool_average(images: Tensor, kernel_size: Size = 1, strides: Size = 1, pad_mode: str = "valid") -> Tensor:
    """The mean of each window of (n, c, ...); with "same" of what lies inside the image."""
    average = AVERAGES[images.dim() - 3]
    padded, kernel, steps = _pooled(images, kernel_size, strides, pad_mode, 0.0)
    if padded is images:
        return average(images, kernel, steps)
    inside = pad_same(torch.ones_like(images[:1, :1]), kernel, steps, (1,) * len(kernel), 0.0)
    return average(padded, kernel, steps) / average(inside, kernel, steps)


def _pooled(images: Tensor, kernel_size: Size, strides: Size, pad_mode: str, value: float) -> tuple[Tensor, Any, Any]:
    dims = images.dim() - 2
    kernel, steps = sizes_of(kernel_size, dims), sizes_of(strides, dims)
    if check_padding("Pool", pad_mode, 0) == "same":
        images = pad_same(images, kernel, steps, (1,) * dims, value)
    return images, kernel, steps
