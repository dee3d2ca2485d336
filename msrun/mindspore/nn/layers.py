"""Layers with weights, with MindSpore's arguments, computed by torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from msrun import runtime
from msrun.errors import UsageError
from msrun.mindspore import windows
from msrun.mindspore.initializer import fill
from msrun.mindspore.nn.table import Made, get_activation
from msrun.mindspore.windows import check_format, check_padding, pad_same, pad_sides, sides_of, sizes_of

_AFFINE = {"weight": "gamma", "bias": "beta"}


class Dense(Made, nn.Linear):
    """`activation(x weight^T + bias)`, weight (out_channels, in_channels).

    Args:
        weight_init, bias_init: see `initializer`; None as torch.nn.Linear, which is MindSpore's default.
        activation: a cell, a function of the result, or the name of one; None for none.
    """

    words = """
    in_channels>in_features out_channels>out_features weight_init=None bias_init=None has_bias>bias=True activation=None
    dtype=float32
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        activation = vars(self).pop("_asked")
        self.activation = get_activation(activation) if isinstance(activation, str) else activation

    def _torchs(self, given: dict[str, Any]) -> dict[str, Any]:
        vars(self)["_asked"] = given.pop("activation")
        return given

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_channels) of an input (..., in_channels)."""
        result = super().forward(input)
        return result if self.activation is None else self.activation(result)


class _Windowed(Made):
    dims: int

    def _window(self, given: dict[str, Any]) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Make sizes one number a dimension; returns the pad mode, and what is added before and after each."""
        name, padding = type(self).__name__, given.pop("padding")
        check_format(name, given.pop("data_format", "NCHW"))
        mode = check_padding(name, given.pop("pad_mode"), padding)
        for word in ("kernel_size", "stride", "dilation"):
            if word in given:
                given[word] = sizes_of(given[word], self.dims)
        vars(self)["pad_mode"] = mode
        return mode, *sides_of(padding, self.dims)


class _Conv(_Windowed):
    """Convolution of (n, in_channels, ...).

    Args:
        pad_mode: "same": as many results as ceil(size / stride); "valid": none outside; "pad": `padding` on each side.
        weight_init, bias_init: see `initializer`; None as torch's layer, which is MindSpore's default.

    Raises:
        UsageError: another pad_mode, or `padding` without "pad".
    """

    words = """
    in_channels out_channels kernel_size stride=1 pad_mode='same' padding=0 dilation=1 group>groups=1
    has_bias>bias=False weight_init=None bias_init=None data_format='NCHW' dtype=float32
    """

    def _torchs(self, given: dict[str, Any]) -> dict[str, Any]:
        _, before, after = self._window(given)
        vars(self)["uneven"] = None if before == after else (before, after)
        return {**given, "padding": before if before == after else 0}

    def forward(self, input: Tensor) -> Tensor:
        """Return (n, out_channels, ...)."""
        if self.pad_mode == "same":
            input = pad_same(input, self.kernel_size, self.stride, self.dilation, 0.0)
        elif self.uneven is not None:
            input = pad_sides(input, *self.uneven)
        return super().forward(input)


class _ConvTranspose(_Windowed):
    """Transposed convolution: with "same" each size times the stride.

    Raises:
        UsageError: another pad_mode, or `padding` without "pad".
    """

    words = """
    in_channels out_channels kernel_size stride=1 pad_mode='same' padding=0 output_padding=0 dilation=1 group>groups=1
    has_bias>bias=False weight_init=None bias_init=None dtype=float32
    """

    def _torchs(self, given: dict[str, Any]) -> dict[str, Any]:
        mode, before, after = self._window(given)
        if before != after:
            raise UsageError(f"{type(self).__name__}(padding={(before, after)}): the same on both sides")
        return {**given, "padding": before} if mode == "pad" else {**given, "output_padding": 0}

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


class _Pool(_Windowed):
    words = "kernel_size=1 stride=1 pad_mode='valid' padding=0 data_format='NCHW' ceil_mode=False"
    pool: Any

    def _torchs(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"padding": self._window(given)[1], **given}

    def forward(self, input: Tensor) -> Tensor:
        """Return (n, c, ...)."""
        if self.pad_mode != "same":
            return super().forward(input)
        if input.dim() != self.dims + 2:
            raise UsageError(f"{self.cls_name}: an input of {self.dims + 2} dimensions, not {input.dim()}")
        return self.pool(input, self.kernel_size, self.stride, "same")


class _MaxPool(_Pool):
    pool = staticmethod(windows.pool_largest)


class _AvgPool(_Pool):
    pool = staticmethod(windows.pool_average)


class _BatchNorm(Made):
    """Batch normalisation. MindSpore's momentum is what remains of the moving average: 0.9.

    Args:
        use_batch_statistics: None: as the mode of training says; no other value is taken.

    Raises:
        UsageError: `use_batch_statistics` other than None, or another data_format than NCHW.
    """

    words = """
    num_features eps=1e-5 momentum=0.9 affine=True gamma_init>weight_init='ones' beta_init>bias_init='zeros'
    moving_mean_init='zeros' moving_var_init='ones' use_batch_statistics=None data_format='NCHW' dtype=float32
    """
    mindspores_names = _AFFINE | {"running_mean": "moving_mean", "running_var": "moving_variance"}

    def _torchs(self, given: dict[str, Any]) -> dict[str, Any]:
        name, batch = type(self).__name__, given.pop("use_batch_statistics")
        check_format(name, given.pop("data_format"))
        if batch not in (None, True):
            raise UsageError(
                f"{name}(use_batch_statistics={batch}): leave it out; set_train(False) uses the moving averages"
            )
        vars(self)["_moving"] = given.pop("moving_mean_init"), given.pop("moving_var_init")
        return {**given, "momentum": 1 - given["momentum"]}

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        mean, variance = vars(self).pop("_moving")
        for buffer, init, usual in ((self.running_mean, mean, "zeros"), (self.running_var, variance, "ones")):
            if init != usual:
                fill(buffer, init)


class LayerNorm(Made, nn.LayerNorm):
    """Layer normalisation over the last dimensions.

    Raises:
        UsageError: it would begin at another dimension than `normalized_shape` does.
    """

    mindspores_names = _AFFINE
    words = """
    normalized_shape begin_norm_axis=-1 begin_params_axis=-1 gamma_init>weight_init='ones' beta_init>bias_init='zeros'
    epsilon>eps=1e-7 dtype=float32
    """

    def _torchs(self, given: dict[str, Any]) -> dict[str, Any]:
        size = given["normalized_shape"]
        shape = given["normalized_shape"] = [size] if isinstance(size, int) else list(size)
        axes = given.pop("begin_norm_axis"), given.pop("begin_params_axis")
        if any(axis < 0 and axis not in (-1, -len(shape)) for axis in axes):
            raise self._wrong(f"begin_norm_axis={axes[0]}, begin_params_axis={axes[1]}): both", shape)
        vars(self)["begin_norm_axis"] = axes[0]
        return given

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input."""
        axis, shape = self.begin_norm_axis, self.normalized_shape
        if axis > 0 and input.dim() - axis != len(shape):
            raise self._wrong(f"begin_norm_axis={axis}) of an input of {input.dim()} dimensions:", shape)
        return super().forward(input)

    def _wrong(self, what: str, shape: Any) -> UsageError:
        return UsageError(f"LayerNorm({what} must be {-len(shape)}, as normalized_shape {tuple(shape)} says")


class Embedding(Made, nn.Embedding):
    """Rows of a table (vocab_size, embedding_size)."""

    mindspores_names = {"weight": "embedding_table"}

    words = """
    vocab_size>num_embeddings embedding_size>embedding_dim use_one_hot>=False embedding_table>weight_init='normal'
    dtype=float32 padding_idx=None
    """


class EmbeddingLookup(Made, runtime.EmbeddingLookup):
    """Rows of a table on the host or the device, which ranks may share out; see `msrun.runtime.EmbeddingLookup`.

    Args:
        param_init: see `initializer`. Of what is not "normal", "uniform", "zeros", "ones", a number or a tensor, every
            rank makes the whole table for a moment.
    """

    mindspores_names = {"weight": "embedding_table"}

    words = """
    vocab_size embedding_size param_init='normal' target='CPU' slice_mode='batch_slice' manual_shapes=None max_norm=None
    sparse=True vocab_cache_size=0 dtype=float32
    """

    def _torchs(self, given: dict[str, Any]) -> dict[str, Any]:
        first = given["param_init"]
        is_known = isinstance(first, int | float | Tensor) or first in ("normal", "uniform", "zeros", "ones")
        return given if is_known else {**given, "param_init": partial(fill, init=first)}


class Dropout(Made, nn.Dropout):
    """Zeros elements with probability `p`; `keep_prob` is MindSpore's older word for 1 - p."""

    words = "keep_prob=None p=None dtype>=float32"

    def _torchs(self, given: dict[str, Any]) -> dict[str, Any]:
        keep_prob, p = given.values()
        if (keep_prob is None) == (p is None):
            raise UsageError(f"Dropout(keep_prob={keep_prob!r}, p={p!r}): give one of them")
        return {"p": 1 - keep_prob if p is None else p}


class _Recurrent(Made):
    """A recurrent network over (length, n, input_size), or with batch_first (n, length, input_size)."""

    words = """
    input_size hidden_size num_layers=1 has_bias>bias=True batch_first=False dropout=0.0 bidirectional=False
    dtype=float32
    """

    def _torchs(self, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "dropout": float(given["dropout"])}

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

    words = f"{_Recurrent.words} * nonlinearity='tanh'"


BY_DIMS: dict[str, type[nn.Module]] = {}
"""Name -> layer over images of one, two and three dimensions."""
for _layer, _name, _theirs, _words in (
    (_Conv, "Conv{}d", "Conv{}d", 'Convolution of (n, in_channels, {}) with pad modes; "same" is the default.'),
    (_ConvTranspose, "Conv{}dTranspose", "ConvTranspose{}d", "Transposed convolution of (n, in_channels, {})."),
    (_MaxPool, "MaxPool{}d", "MaxPool{}d", "The largest of each window of (n, c, {}). `pad_mode` as of Conv2d."),
    (_AvgPool, "AvgPool{}d", "AvgPool{}d", "The mean of each window of (n, c, {}); with same of what lies inside."),
    (_BatchNorm, "BatchNorm{}d", "BatchNorm{}d", "Batch normalisation of (n, c, {}). Its momentum is what remains."),
):
    for _dims, _sizes in enumerate(("length", "h, w", "d, h, w"), start=1):
        _body = {"dims": _dims, "__doc__": _words.format(_sizes), "__module__": "msrun.mindspore.nn"}
        _kind = type(_name.format(_dims), (_layer, getattr(nn, _theirs.format(_dims))), _body)
        BY_DIMS[_name.format(_dims)] = _kind
