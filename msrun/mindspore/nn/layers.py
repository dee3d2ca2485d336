"""Layers with weights, with MindSpore's arguments, computed by torch's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msrun import runtime
from msrun.errors import UsageError
from msrun.mindspore.initializer import begin, fill
from msrun.mindspore.nn.cells import Cell
from msrun.mindspore.windows import Size, check_padding, pad_same, pad_sides, pool_average, sides_of, sizes_of


class Dense(Cell, nn.Linear):
    """`activation(x weight^T + bias)`, weight (out_channels, in_channels).

    Args:
        weight_init, bias_init: see `initializer`; None as torch.nn.Linear, which is MindSpore's default.
        activation: a cell, a function of the result, or the name of one; None for none.
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
        begin(self, weight_init, bias_init)
        if isinstance(activation, str):
            from msrun.mindspore.nn.table import get_activation

            activation = get_activation(activation)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_channels) of an input (..., in_channels)."""
        result = super().forward(input)
        return result if self.activation is None else self.activation(result)


class _Conv(Cell):
    """Convolution of (n, in_channels, ...).

    Args:
        pad_mode: "same": as many results as ceil(size / stride); "valid": none outside; "pad": `padding` on each side.
        weight_init, bias_init: see `initializer`; None as torch's layer, which is MindSpore's default.

    Raises:
        UsageError: another pad_mode, or `padding` without "pad".
    """

    dims: int

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
        data_format: str = "NCHW",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _check_format(self, data_format)
        mode = check_padding(type(self).__name__, pad_mode, padding)
        dims = self.dims
        before, after = sides_of(padding, dims)
        settings = [sizes_of(kernel_size, dims), sizes_of(stride, dims), before if before == after else 0]
        super(Cell, self).__init__(
            in_channels, out_channels, *settings, sizes_of(dilation, dims), group, has_bias, dtype=dtype
        )
        self.pad_mode = mode
        self.uneven = None if before == after else (before, after)
        begin(self, weight_init, bias_init)

    def forward(self, input: Tensor) -> Tensor:
        """Return (n, out_channels, ...)."""
        if self.pad_mode == "same":
            input = pad_same(input, self.kernel_size, self.stride, self.dilation, 0.0)
        elif self.uneven is not None:
            input = pad_sides(input, *self.uneven)
        return super().forward(input)


class _ConvTranspose(Cell):
    """Transposed convolution: with "same" each size times the stride.

    Raises:
        UsageError: another pad_mode, or `padding` without "pad".
    """

    dims: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        pad_mode: str = "same",
        padding: Size = 0,
        output_padding: Size = 0,
        dilation: Size = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Any = None,
        bias_init: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        mode, dims = check_padding(type(self).__name__, pad_mode, padding), self.dims
        before, after = sides_of(padding, dims)
        if before != after:
            raise UsageError(f"{type(self).__name__}(padding={padding!r}): the same on both sides")
        sizes = [sizes_of(kernel_size, dims), sizes_of(stride, dims)]
        edges = [before, output_padding] if mode == "pad" else [0, 0]
        settings = [*sizes, *edges, group, has_bias, sizes_of(dilation, dims)]
        super(Cell, self).__init__(in_channels, out_channels, *settings, dtype=dtype)
        self.pad_mode = mode
        begin(self, weight_init, bias_init)

    def forward(self, input: Tensor) -> Tensor:
        """Return (n, out_channels, ...)."""
        result = super().forward(input)
        if self.pad_mode != "same":
            return result
        for dim, (size, step) in enumerate(zip(input.shape[2:], self.stride, strict=True), start=2):
            surplus = result.shape[dim] - size * step
            result = result.narrow(dim, surplus // 2, size * step) if surplus > 0 else result
            if surplus < 0:
                result = F.pad(result, [0, 0] * (result.dim() - 1 - dim) + [0, -surplus])
        return result


class _Pool(Cell):
    dims: int

    def __init__(
        self,
        kernel_size: Size = 1,
        stride: Size = 1,
        pad_mode: str = "valid",
        padding: Size = 0,
        data_format: str = "NCHW",
        ceil_mode: bool = False,
    ) -> None:
        _check_format(self, data_format)
        self_mode, dims = check_padding(type(self).__name__, pad_mode, padding), self.dims
        sizes = [sizes_of(kernel_size, dims), sizes_of(stride, dims), sides_of(padding, dims)[0]]
        super(Cell, self).__init__(*sizes, ceil_mode=ceil_mode)
        self.pad_mode = self_mode


class _MaxPool(_Pool):
    def forward(self, input: Tensor) -> Tensor:
        """Return (n, c, ...)."""
        if self.pad_mode == "same":
            input = pad_same(input, self.kernel_size, self.stride, (1,) * self.dims, float("-inf"))
        return super().forward(input)


class _AvgPool(_Pool):
    def forward(self, input: Tensor) -> Tensor:
        """Return (n, c, ...)."""
        if self.pad_mode == "same":
            return pool_average(input, self.kernel_size, self.stride, "same")
        return super().forward(input)


class _BatchNorm(Cell):
    """Batch normalisation. MindSpore's momentum is what remains of the moving average: 0.9.

    Args:
        use_batch_statistics: None: as the mode of training says; no other value is taken.

    Raises:
        UsageError: `use_batch_statistics` other than None, or another data_format than NCHW.
    """

    mindspores_names = {
        "weight": "gamma",
        "bias": "beta",
        "running_mean": "moving_mean",
        "running_var": "moving_variance",
    }

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        affine: bool = True,
        gamma_init: Any = "ones",
        beta_init: Any = "zeros",
        moving_mean_init: Any = "zeros",
        moving_var_init: Any = "ones",
        use_batch_statistics: bool | None = None,
        data_format: str = "NCHW",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _check_format(self, data_format)
        super(Cell, self).__init__(num_features, eps, 1 - momentum, affine, dtype=dtype)
        begin(self, gamma_init, beta_init)
        for buffer, init, usual in (
            (self.running_mean, moving_mean_init, "zeros"),
            (self.running_var, moving_var_init, "ones"),
        ):
            if init != usual:
                fill(buffer, init)
        if use_batch_statistics not in (None, True):
            raise UsageError(
                f"{type(self).__name__}(use_batch_statistics={use_batch_statistics}): leave it out; set_train(False) "
                "uses the moving averages"
            )


class LayerNorm(Cell, nn.LayerNorm):
    """Layer normalisation over the last dimensions.

    Raises:
        UsageError: it would begin at another dimension than `normalized_shape` does.
    """

    mindspores_names = {"weight": "gamma", "bias": "beta"}

    def __init__(
        self,
        normalized_shape: Size,
        begin_norm_axis: int = -1,
        begin_params_axis: int = -1,
        gamma_init: Any = "ones",
        beta_init: Any = "zeros",
        epsilon: float = 1e-7,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        self_axes = {begin_norm_axis, begin_params_axis}
        if any(axis < 0 and axis not in (-1, -len(shape)) for axis in self_axes):
            raise UsageError(
                f"LayerNorm(begin_norm_axis={begin_norm_axis}, begin_params_axis={begin_params_axis}): both must be "
                f"{-len(shape)}, as normalized_shape {tuple(shape)} says"
            )
        nn.LayerNorm.__init__(self, shape, epsilon, dtype=dtype)
        self.begin_norm_axis = begin_norm_axis
        begin(self, gamma_init, beta_init)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input."""
        axis = self.begin_norm_axis
        if axis > 0 and input.dim() - axis != len(self.normalized_shape):
            raise UsageError(
                f"LayerNorm(begin_norm_axis={axis}) of an input of {input.dim()} dimensions: must be "
                f"{-len(self.normalized_shape)}, as normalized_shape {tuple(self.normalized_shape)} says"
            )
        return super().forward(input)


class Embedding(Cell, nn.Embedding):
    """Rows of a table (vocab_size, embedding_size)."""

    mindspores_names = {"weight": "embedding_table"}

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

    mindspores_names = {"weight": "embedding_table"}

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
        first = param_init if is_known else partial(fill, init=param_init)
        words = (target, slice_mode, manual_shapes, max_norm, sparse, vocab_cache_size, dtype)
        runtime.EmbeddingLookup.__init__(self, vocab_size, embedding_size, first, *words)


class Dropout(Cell, nn.Dropout):
    """Zeros elements with probability `p`; `keep_prob` is MindSpore's older word for 1 - p."""

    def __init__(
        self, keep_prob: float | None = None, p: float | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        del dtype
        if (keep_prob is None) == (p is None):
            raise UsageError(f"Dropout(keep_prob={keep_prob!r}, p={p!r}): give one of them")
        nn.Dropout.__init__(self, 1 - keep_prob if p is None else p)  # type: ignore[operator]


class _Recurrent(Cell):
    """A recurrent network over (length, n, input_size), or with batch_first (n, length, input_size)."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        has_bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        settings |= {"dropout": float(dropout), "bidirectional": bidirectional, "dtype": dtype}
        super(Cell, self).__init__(
            input_size, hidden_size, num_layers=num_layers, bias=has_bias, batch_first=batch_first, **settings
        )

    def forward(self, x: Tensor, hx: Any = None, seq_length: Tensor | None = None) -> Any:
        """Return (outputs, last state)."""
        if seq_length is None:
            return super().forward(x, hx)
        total = x.shape[1 if self.batch_first else 0]
        packed = nn.utils.rnn.pack_padded_sequence(x, seq_length.cpu().long(), self.batch_first, enforce_sorted=False)
        outputs, state = super().forward(packed, hx)
        return nn.utils.rnn.pad_packed_sequence(outputs, self.batch_first, total_length=total)[0], state


class LSTM(_Recurrent, nn.LSTM):  # type: ignore[misc]
    """Long short-term memory."""


class GRU(_Recurrent, nn.GRU):  # type: ignore[misc]
    """Gated recurrent units."""


class RNN(_Recurrent, nn.RNN):  # type: ignore[misc]
    """A plain recurrent network; `nonlinearity` "tanh" or "relu"."""


def _check_format(layer: nn.Module, data_format: str) -> None:
    if data_format not in ("NCHW", "NCDHW"):
        name = type(layer).__name__
        raise UsageError(f"{name}(data_format={data_format!r}): NCHW; transpose the images with (0, 3, 1, 2)")


def _by_dims(layer: type[Cell], name: str, words: str, *bases: type[nn.Module]) -> dict[str, type[nn.Module]]:
    """Return the layer over images of one, two and three dimensions, on torch's classes."""
    made: dict[str, type[nn.Module]] = {}
    for dims, (base, sizes) in enumerate(zip(bases, ("length", "h, w", "d, h, w"), strict=True), start=1):
        body = {"dims": dims, "__doc__": words.format(sizes), "__module__": "msrun.mindspore.nn"}
        made[name.format(dims)] = type(name.format(dims), (layer, base), body)
    return made


BY_DIMS = {
    **_by_dims(_Conv, "Conv{}d", "Convolution of (n, in_channels, {}) with pad modes; \"same\" is the default.",
               nn.Conv1d, nn.Conv2d, nn.Conv3d),
    **_by_dims(_ConvTranspose, "Conv{}dTranspose", "Transposed convolution of (n, in_channels, {}).",
               nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    **_by_dims(_MaxPool, "MaxPool{}d", "The largest of each window of (n, c, {}). `pad_mode` as of Conv2d.",
               nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    **_by_dims(_AvgPool, "AvgPool{}d", "The mean of each window of (n, c, {}); with pad_mode same of what lies inside.",
               nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    **_by_dims(_BatchNorm, "BatchNorm{}d", "Batch normalisation of (n, c, {}). Its momentum is what remains: 0.9.",
               nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
}  # fmt: skip
"""Name -> layer."""
