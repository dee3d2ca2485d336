"""Layers with MindSpore's arguments, computed by torch's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msrun import runtime
from msrun.errors import UsageError
from msrun.mindspore.initializer import fill
from msrun.mindspore.nn.cell import Cell

Size = int | Sequence[int]


class Dense(Cell, nn.Linear):
    """`activation(x weight^T + bias)`, weight (out_channels, in_channels).

    Args:
        weight_init, bias_init: see `initializer`; None as torch.nn.Linear, which is MindSpore's default.
        activation: a cell or a function of the result; None for none.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        weight_init: Any = None,
        bias_init: Any = None,
        has_bias: bool = True,
        activation: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        nn.Linear.__init__(self, in_channels, out_channels, has_bias, dtype=dtype)
        _begin(self, weight_init, bias_init)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_channels) of an input (..., in_channels)."""
        result = super().forward(input)
        return result if self.activation is None else self.activation(result)


class Conv2d(Cell, nn.Conv2d):
    """Convolution of (n, in_channels, h, w).

    Args:
        pad_mode: "same": as many results as ceil(size / stride); "valid": none outside; "pad": `padding` on each side.
        weight_init, bias_init: see `initializer`; None as torch.nn.Conv2d, which is MindSpore's default.

    Raises:
        UsageError: another pad_mode, or `padding` without "pad".
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        pad_mode: str = "same",
        padding: Size = 0,
        dilation: Size = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:
        _check_padding("Conv2d", pad_mode, padding)
        before, after = _sides(padding)
        nn.Conv2d.__init__(
            self,
            in_channels,
            out_channels,
            _pair(kernel_size),
            _pair(stride),
            before if before == after else 0,
            _pair(dilation),
            group,
            has_bias,
        )
        self.pad_mode = pad_mode
        self.uneven = None if before == after else (before, after)
        _begin(self, weight_init, bias_init)

    def forward(self, input: Tensor) -> Tensor:
        """Return (n, out_channels, h', w')."""
        if self.pad_mode == "same":
            input = _pad_same(input, self.kernel_size, self.stride, self.dilation, 0.0)
        elif self.uneven is not None:
            (top, left), (bottom, right) = self.uneven
            input = F.pad(input, (left, right, top, bottom))
        return super().forward(input)


class _Pool(Cell):
    def __init__(self, kernel_size: Size = 1, stride: Size = 1, pad_mode: str = "valid", padding: Size = 0) -> None:
        _check_padding(type(self).__name__, pad_mode, padding)
        super(Cell, self).__init__(_pair(kernel_size), _pair(stride), _sides(padding)[0])
        self.pad_mode = pad_mode


class MaxPool2d(_Pool, nn.MaxPool2d):
    """The largest of each window of (n, c, h, w). `pad_mode` "same" or "valid", as of Conv2d."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (n, c, h', w')."""
        if self.pad_mode == "same":
            input = _pad_same(input, self.kernel_size, self.stride, (1, 1), float("-inf"))
        return super().forward(input)


class AvgPool2d(_Pool, nn.AvgPool2d):
    """The mean of each window of (n, c, h, w); with `pad_mode` "same" of what lies inside the image."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (n, c, h', w')."""
        if self.pad_mode != "same":
            return super().forward(input)
        kernel, stride = self.kernel_size, self.stride
        padded = _pad_same(input, kernel, stride, (1, 1), 0.0)
        inside = _pad_same(torch.ones_like(input[:1, :1]), kernel, stride, (1, 1), 0.0)
        return F.avg_pool2d(padded, kernel, stride) / F.avg_pool2d(inside, kernel, stride)


class _BatchNorm(Cell):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        affine: bool = True,
        gamma_init: Any = "ones",
        beta_init: Any = "zeros",
    ) -> None:
        super(Cell, self).__init__(num_features, eps, 1 - momentum, affine)
        if affine:
            _begin(self, gamma_init, beta_init)


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """Batch normalisation of (n, c, h, w). MindSpore's momentum is what remains of the moving average: 0.9."""


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """Batch normalisation of (n, c). MindSpore's momentum is what remains of the moving average: 0.9."""


class LayerNorm(Cell, nn.LayerNorm):
    """Layer normalisation over the last dimensions.

    Raises:
        UsageError: it would begin at another dimension than `normalized_shape` does.
    """

    def __init__(
        self,
        normalized_shape: Size,
        begin_norm_axis: int = -1,
        begin_params_axis: int = -1,
        gamma_init: Any = "ones",
        beta_init: Any = "zeros",
        epsilon: float = 1e-7,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        if begin_norm_axis not in (-1, -len(shape)) or begin_params_axis not in (-1, -len(shape)):
            raise UsageError(
                f"LayerNorm(begin_norm_axis={begin_norm_axis}, begin_params_axis={begin_params_axis}): both must be "
                f"{-len(shape)}, as normalized_shape {tuple(shape)} says"
            )
        nn.LayerNorm.__init__(self, shape, epsilon)
        _begin(self, gamma_init, beta_init)


class Embedding(Cell, nn.Embedding):
    """Rows of a table (vocab_size, embedding_size)."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        use_one_hot: bool = False,
        embedding_table: Any = "normal",
        dtype: torch.dtype = torch.float32,
        padding_idx: int | None = None,
    ) -> None:
        del use_one_hot  # a way to compute the same
        nn.Embedding.__init__(self, vocab_size, embedding_size, padding_idx, dtype=dtype)
        fill(self.weight, embedding_table)


class EmbeddingLookup(Cell, runtime.EmbeddingLookup):
    """Rows of a table on the host or the device, which ranks may share out; see `msrun.runtime.EmbeddingLookup`.

    Args:
        param_init: see `initializer`. Of what is not "normal", "uniform", "zeros", "ones", a number or a tensor, every
            rank makes the whole table for a moment.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        param_init: Any = "normal",
        target: str = "CPU",
        slice_mode: str = "batch_slice",
        manual_shapes: Sequence[int] | None = None,
        max_norm: float | None = None,
        sparse: bool = True,
        vocab_cache_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        is_known = isinstance(param_init, int | float | Tensor) or param_init in ("normal", "uniform", "zeros", "ones")
        runtime.EmbeddingLookup.__init__(
            self,
            vocab_size,
            embedding_size,
            param_init if is_known else partial(fill, init=param_init),
            target,
            slice_mode,
            manual_shapes,
            max_norm,
            sparse,
            vocab_cache_size,
            dtype,
        )


class Dropout(Cell, nn.Dropout):
    """Zeros elements with probability `p`; `keep_prob` is MindSpore's older word for 1 - p."""

    def __init__(self, keep_prob: float | None = None, p: float | None = None) -> None:
        if (keep_prob is None) == (p is None):
            raise UsageError(f"Dropout(keep_prob={keep_prob!r}, p={p!r}): give one of them")
        nn.Dropout.__init__(self, 1 - keep_prob if p is None else p)  # type: ignore[operator]


class Softmax(Cell, nn.Softmax):
    """Softmax along an axis."""

    def __init__(self, axis: int = -1) -> None:
        nn.Softmax.__init__(self, axis)


class Flatten(Cell, nn.Flatten):
    """(n, ...) -> (n, product)."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        nn.Flatten.__init__(self, start_dim, end_dim)


class ReLU(Cell, nn.ReLU):
    """max(x, 0)."""


class GELU(Cell, nn.GELU):
    """Gaussian error linear unit; MindSpore's default is the tanh approximation."""

    def __init__(self, approximate: bool = True) -> None:
        nn.GELU.__init__(self, "tanh" if approximate else "none")


class Sigmoid(Cell, nn.Sigmoid):
    """1 / (1 + exp(-x))."""


class Tanh(Cell, nn.Tanh):
    """Hyperbolic tangent."""


class Identity(Cell, nn.Identity):
    """What it is given."""


def _begin(layer: Any, weight_init: Any, bias_init: Any) -> None:
    if weight_init is not None:
        fill(layer.weight, weight_init)
    if bias_init is not None and layer.bias is not None:
        fill(layer.bias, bias_init)


def _pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _sides(padding: Size) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (top, left), (bottom, right) of one number or of (top, bottom, left, right)."""
    if isinstance(padding, int):
        return (padding, padding), (padding, padding)
    if len(padding) == 2:
        return (padding[0], padding[1]), (padding[0], padding[1])
    top, bottom, left, right = padding
    return (top, left), (bottom, right)


def _check_padding(name: str, pad_mode: str, padding: Size) -> None:
    if pad_mode not in ("same", "valid", "pad"):
        raise UsageError(f"{name}(pad_mode={pad_mode!r}): one of same, valid, pad")
    if pad_mode != "pad" and padding not in (0, (0, 0, 0, 0)):
        raise UsageError(f'{name}(pad_mode={pad_mode!r}, padding={padding!r}): padding needs pad_mode="pad"')


def _pad_same(images: Tensor, kernel: Any, stride: Any, dilation: Any, value: float) -> Tensor:
    """Pad so that there are ceil(size / stride) windows; the odd row and column come last, as in MindSpore."""
    edges: list[int] = []
    for size, window, step, spread in zip(images.shape[2:], kernel, stride, dilation, strict=True):
        whole = max((-(-size // step) - 1) * step + (window - 1) * spread + 1 - size, 0)
        edges = [whole // 2, whole - whole // 2, *edges]
    return F.pad(images, edges, value=value) if any(edges) else images
