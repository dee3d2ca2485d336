"""Layers without weights of their own, padding, pools that adapt, cells of recurrent networks and losses: the table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import UsageError, near_miss
from msrun.mindspore.initializer import begin
from msrun.mindspore.nn.cells import Cell
from msrun.mindspore.ops import OPERATORS
from msrun.mindspore.ops.neural import as_classes


def _of_torch(name: str, base: type[nn.Module], arguments: Callable[..., Any]) -> type[nn.Module]:
    """Return a cell with MindSpore's arguments on torch's class."""

    def __init__(self: Any, *args: Any, **settings: Any) -> None:  # noqa: N807
        try:
            given = arguments(*args, **settings)
        except TypeError as error:
            raise UsageError(f"nn.{str(error).replace('<lambda>', name)}") from None
        first = given.pop("begin", (None, None))
        super(Cell, self).__init__(**given)
        if first != (None, None):
            begin(self, *first)

    has_gamma = arguments is not dict and "gamma_init" in inspect.signature(arguments).parameters
    body = {
        "arguments": staticmethod(arguments),
        "mindspores_names": {"weight": "gamma", "bias": "beta"} if has_gamma else {},
        "__init__": __init__,
        "__doc__": f"torch.nn.{base.__name__} with MindSpore's arguments.",
    }
    return type(name, (Cell, base), {**body, "__module__": "msrun.mindspore.nn"})


class _OfOperator(Cell):
    """A cell that calls one operator of the tables."""

    operator: Callable[..., Any]
    arguments: Callable[..., Any]

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__()
        try:
            self._settings = type(self).arguments(*args, **settings)
        except TypeError as error:
            raise UsageError(f"nn.{str(error).replace('<lambda>', type(self).__name__)}") from None

    def forward(self, *inputs: Any) -> Any:
        """Return what the operator computes."""
        return type(self).operator(*inputs, **self._settings)


def _of_operator(name: str, operator: Any, arguments: Callable[..., Any]) -> type[nn.Module]:
    function = operator if callable(operator) else OPERATORS[operator]
    body = {"operator": staticmethod(function), "arguments": staticmethod(arguments), "__doc__": f"`{name}`, a cell."}
    return type(name, (_OfOperator,), {**body, "__module__": "msrun.mindspore.nn"})


def _instance_norm(
    num_features: int,
    eps: float = 1e-5,
    momentum: float = 0.1,
    affine: bool = True,
    gamma_init: Any = "ones",
    beta_init: Any = "zeros",
    dtype: Any = torch.float32,
) -> dict[str, Any]:
    settings = {"num_features": num_features, "eps": eps, "momentum": momentum, "affine": affine, "dtype": dtype}
    return {**settings, "begin": (gamma_init, beta_init)}


def _loss(reduction: str = "mean") -> dict[str, Any]:
    return {"reduction": reduction}


def _padding(padding: Any) -> dict[str, Any]:
    return {"padding": padding if isinstance(padding, int) else tuple(padding)}


def _cell(input_size: int, hidden_size: int, has_bias: bool = True, dtype: Any = torch.float32) -> dict[str, Any]:
    return {"input_size": input_size, "hidden_size": hidden_size, "bias": has_bias, "dtype": dtype}


def _of_transformer(
    d_model: int,
    nhead: int,
    dim_feedforward: int = 2048,
    dropout: float = 0.1,
    activation: Any = "relu",
    layer_norm_eps: float = 1e-5,
    batch_first: bool = False,
    norm_first: bool = False,
    dtype: Any = torch.float32,
) -> dict[str, Any]:
    return dict(locals())


OF_TORCH: dict[str, tuple[type[nn.Module], Callable[..., Any]]] = {
    "Softmax": (nn.Softmax, lambda axis=-1: {"dim": axis}),
    "LogSoftmax": (nn.LogSoftmax, lambda axis=-1: {"dim": axis}),
    "Softmin": (nn.Softmin, lambda axis=-1: {"dim": axis}),
    "Softmax2d": (nn.Softmax2d, dict),
    "Flatten": (nn.Flatten, lambda start_dim=1, end_dim=-1: {"start_dim": start_dim, "end_dim": end_dim}),
    "Unflatten": (nn.Unflatten, lambda axis, unflattened_size: {"dim": axis, "unflattened_size": unflattened_size}),
    "ReLU": (nn.ReLU, dict),
    "ReLU6": (nn.ReLU6, dict),
    "GELU": (nn.GELU, lambda approximate=True: {"approximate": "tanh" if approximate else "none"}),
    "Sigmoid": (nn.Sigmoid, dict),
    "Tanh": (nn.Tanh, dict),
    "Identity": (nn.Identity, lambda *args, **settings: {}),
    "LeakyReLU": (nn.LeakyReLU, lambda alpha=0.2: {"negative_slope": alpha}),
    "ELU": (nn.ELU, lambda alpha=1.0: {"alpha": alpha}),
    "CELU": (nn.CELU, lambda alpha=1.0: {"alpha": alpha}),
    "SeLU": (nn.SELU, dict),
    "SiLU": (nn.SiLU, dict),
    "Mish": (nn.Mish, dict),
    "HSwish": (nn.Hardswish, dict),
    "HSigmoid": (nn.Hardsigmoid, dict),
    "HShrink": (nn.Hardshrink, lambda lambd=0.5: {"lambd": lambd}),
    "SoftShrink": (nn.Softshrink, lambda lambd=0.5: {"lambd": lambd}),
    "Hardtanh": (nn.Hardtanh, lambda min_val=-1.0, max_val=1.0: {"min_val": min_val, "max_val": max_val}),
    "LogSigmoid": (nn.LogSigmoid, dict),
    "Softsign": (nn.Softsign, dict),
    "Tanhshrink": (nn.Tanhshrink, dict),
    "Threshold": (nn.Threshold, lambda threshold, value: {"threshold": threshold, "value": value}),
    "GLU": (nn.GLU, lambda axis=-1: {"dim": axis}),
    "PReLU": (nn.PReLU, lambda channel=1, w=0.25: {"num_parameters": channel, "init": float(w)}),
    "Dropout1d": (nn.Dropout1d, lambda p=0.5: {"p": p}),
    "Dropout2d": (nn.Dropout2d, lambda p=0.5: {"p": p}),
    "Dropout3d": (nn.Dropout3d, lambda p=0.5: {"p": p}),
    "AdaptiveAvgPool1d": (nn.AdaptiveAvgPool1d, lambda output_size: {"output_size": output_size}),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d, lambda output_size: {"output_size": output_size}),
    "AdaptiveAvgPool3d": (nn.AdaptiveAvgPool3d, lambda output_size: {"output_size": output_size}),
    "AdaptiveMaxPool1d": (nn.AdaptiveMaxPool1d, lambda output_size: {"output_size": output_size}),
    "AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d, lambda output_size, return_indices=False: {
        "output_size": output_size, "return_indices": return_indices}),
    "ConstantPad1d": (nn.ConstantPad1d, lambda padding, value: {"padding": padding, "value": value}),
    "ConstantPad2d": (nn.ConstantPad2d, lambda padding, value: {"padding": padding, "value": value}),
    "ConstantPad3d": (nn.ConstantPad3d, lambda padding, value: {"padding": padding, "value": value}),
    "ZeroPad2d": (nn.ZeroPad2d, _padding),
    "ReflectionPad1d": (nn.ReflectionPad1d, _padding),
    "ReflectionPad2d": (nn.ReflectionPad2d, _padding),
    "ReflectionPad3d": (nn.ReflectionPad3d, _padding),
    "ReplicationPad1d": (nn.ReplicationPad1d, _padding),
    "ReplicationPad2d": (nn.ReplicationPad2d, _padding),
    "ReplicationPad3d": (nn.ReplicationPad3d, _padding),
    "PixelShuffle": (nn.PixelShuffle, lambda upscale_factor: {"upscale_factor": upscale_factor}),
    "PixelUnshuffle": (nn.PixelUnshuffle, lambda downscale_factor: {"downscale_factor": downscale_factor}),
    "ChannelShuffle": (nn.ChannelShuffle, lambda groups: {"groups": groups}),
    "Upsample": (nn.Upsample, lambda size=None, scale_factor=None, mode="nearest", align_corners=None,
        recompute_scale_factor=None: {"size": size, "scale_factor": scale_factor, "mode": mode,
        "align_corners": align_corners, "recompute_scale_factor": recompute_scale_factor}),
    "LSTMCell": (nn.LSTMCell, _cell),
    "GRUCell": (nn.GRUCell, _cell),
    "RNNCell": (nn.RNNCell, lambda input_size, hidden_size, has_bias=True, nonlinearity="tanh", dtype=torch.float32: {
        **_cell(input_size, hidden_size, has_bias, dtype), "nonlinearity": nonlinearity}),
    "GroupNorm": (nn.GroupNorm, lambda num_groups, num_channels, eps=1e-5, affine=True, gamma_init="ones",
        beta_init="zeros", dtype=torch.float32: {"num_groups": num_groups, "num_channels": num_channels, "eps": eps,
        "affine": affine, "dtype": dtype, "begin": (gamma_init, beta_init)}),
    "InstanceNorm1d": (nn.InstanceNorm1d, _instance_norm),
    "InstanceNorm2d": (nn.InstanceNorm2d, _instance_norm),
    "InstanceNorm3d": (nn.InstanceNorm3d, _instance_norm),
    "MSELoss": (nn.MSELoss, _loss),
    "L1Loss": (nn.L1Loss, _loss),
    "MAELoss": (nn.L1Loss, _loss),
    "KLDivLoss": (nn.KLDivLoss, _loss),
    "SoftMarginLoss": (nn.SoftMarginLoss, _loss),
    "SmoothL1Loss": (nn.SmoothL1Loss, lambda beta=1.0, reduction="none": {"beta": beta, "reduction": reduction}),
    "HuberLoss": (nn.HuberLoss, lambda reduction="mean", delta=1.0: {"reduction": reduction, "delta": delta}),
    "BCELoss": (nn.BCELoss, lambda weight=None, reduction="mean": {"weight": weight, "reduction": reduction}),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, lambda reduction="mean", weight=None, pos_weight=None: {
        "weight": weight, "reduction": reduction, "pos_weight": pos_weight}),
    "CosineEmbeddingLoss": (nn.CosineEmbeddingLoss, lambda margin=0.0, reduction="mean": {
        "margin": margin, "reduction": reduction}),
    "MarginRankingLoss": (nn.MarginRankingLoss, lambda margin=0.0, reduction="mean": {
        "margin": margin, "reduction": reduction}),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss, lambda margin=1.0, reduction="mean": {
        "margin": margin, "reduction": reduction}),
    "TripletMarginLoss": (nn.TripletMarginLoss, lambda p=2, swap=False, eps=1e-6, reduction="mean", margin=1.0: {
        "p": p, "swap": swap, "eps": eps, "reduction": reduction, "margin": margin}),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss, lambda weight=None, reduction="mean": {
        "weight": weight, "reduction": reduction}),
    "GaussianNLLLoss": (nn.GaussianNLLLoss, lambda *, full=False, eps=1e-6, reduction="mean": {
        "full": full, "eps": eps, "reduction": reduction}),
    "MultiheadAttention": (nn.MultiheadAttention, lambda embed_dim, num_heads, dropout=0.0, has_bias=True,
        add_bias_kv=False, add_zero_attn=False, kdim=None, vdim=None, batch_first=False, dtype=torch.float32: {
        "embed_dim": embed_dim, "num_heads": num_heads, "dropout": dropout, "bias": has_bias, "kdim": kdim,
        "vdim": vdim, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn, "batch_first": batch_first,
        "dtype": dtype}),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer, _of_transformer),
    "TransformerDecoderLayer": (nn.TransformerDecoderLayer, _of_transformer),
    "TransformerEncoder": (nn.TransformerEncoder, lambda encoder_layer, num_layers, norm=None: {
        "encoder_layer": encoder_layer, "num_layers": num_layers, "norm": norm, "enable_nested_tensor": False}),
    "TransformerDecoder": (nn.TransformerDecoder, lambda decoder_layer, num_layers, norm=None: {
        "decoder_layer": decoder_layer, "num_layers": num_layers, "norm": norm}),
    "PoissonNLLLoss": (nn.PoissonNLLLoss, lambda log_input=True, full=False, eps=1e-8, reduction="mean": {
        "log_input": log_input, "full": full, "eps": eps, "reduction": reduction}),
}  # fmt: skip
"""MindSpore's layer -> torch's class, and torch's arguments from MindSpore's."""


def _norm(x: Tensor, axis: Any = (), keep_dims: bool = False) -> Tensor:
    return torch.sqrt(OPERATORS["reduce_sum"](x * x, axis, keep_dims))


def _clip_by_norm(x: Tensor, clip_norm: Any, axis: Any = None) -> Tensor:
    norm = _norm(x, axis, keep_dims=True)
    return x * clip_norm / torch.maximum(norm, torch.as_tensor(clip_norm, dtype=norm.dtype))


def _resize(
    x: Tensor, size: Any = None, scale_factor: Any = None, align_corners: bool = False, half_pixel_centers: bool = False
) -> Tensor:
    size = [int(side * scale_factor) for side in x.shape[2:]] if size is None else size
    return OPERATORS["ResizeBilinear"].function(x, size, align_corners, half_pixel_centers)


def _signal_to_noise(img1: Tensor, img2: Tensor, max_val: float = 1.0) -> Tensor:
    error = (img1 / max_val - img2 / max_val).square().mean((-3, -2, -1))
    return -10 * torch.log10(error)


OF_OPERATORS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "FastGelu": ("fast_gelu", dict),
    "Pad": ("mirror_pad", lambda paddings, mode="CONSTANT": {"paddings": paddings, "mode": mode}),
    "ResizeBilinear": (_resize, lambda half_pixel_centers=False: {"half_pixel_centers": half_pixel_centers}),
    "OneHot": ("one_hot", lambda axis=-1, depth=1, on_value=1.0, off_value=0.0, dtype=torch.float32: {
        "axis": axis, "depth": depth, "on_value": on_value, "off_value": off_value}),
    "Norm": (_norm, lambda axis=(), keep_dims=False: {"axis": axis, "keep_dims": keep_dims}),
    "ReduceLogSumExp": ("logsumexp", lambda axis, keep_dims=False: {"dim": axis, "keepdim": keep_dims}),
    "Roll": ("roll", lambda shift, axis: {"shifts": shift, "dims": axis}),
    "MatMul": (OPERATORS["MatMul"].function, lambda transpose_x1=False, transpose_x2=False: {
        "transpose_a": transpose_x1, "transpose_b": transpose_x2}),
    "Tril": ("tril", dict),
    "Triu": ("triu", dict),
    "PSNR": (_signal_to_noise, lambda max_val=1.0: {"max_val": max_val}),
    "ClipByNorm": (_clip_by_norm, lambda axis=None: {"axis": axis}),
}  # fmt: skip
"""MindSpore's layer -> the operator of the tables, and its settings from the layer's arguments."""

LAYERS: dict[str, type[nn.Module]] = {
    **{name: _of_torch(name, *row) for name, row in OF_TORCH.items()},
    **{name: _of_operator(name, *row) for name, row in OF_OPERATORS.items()},
}

ACTIVATIONS = {
    **{name.lower(): name for name in ("Softmax", "LogSoftmax", "ReLU", "ReLU6", "Tanh", "GELU", "ELU", "Sigmoid")},
    "prelu": "PReLU",
    "leakyrelu": "LeakyReLU",
    "hswish": "HSwish",
    "hsigmoid": "HSigmoid",
    "fast_gelu": "FastGelu",
    "logsigmoid": "LogSigmoid",
    "softsign": "Softsign",
    "softshrink": "SoftShrink",
    "hshrink": "HShrink",
    "silu": "SiLU",
    "mish": "Mish",
    "selu": "SeLU",
}
"""MindSpore's words for activations."""


def get_activation(name: str, prim_name: str | None = None) -> nn.Module:
    """Return a new layer of an activation.

    Raises:
        UsageError: an unknown word.
    """
    del prim_name
    if name not in ACTIVATIONS:
        raise UsageError(f"activation {name!r}: unknown{near_miss(name, ACTIVATIONS)}; one of {', '.join(ACTIVATIONS)}")
    return LAYERS[ACTIVATIONS[name]]()


class CrossEntropyLoss(Cell, nn.CrossEntropyLoss):
    """Cross-entropy of scores (n, classes, ...) with class numbers of any integer type, or probabilities."""

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        nn.CrossEntropyLoss.__init__(
            self, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        return super().forward(input, as_classes(target))


class NLLLoss(Cell, nn.NLLLoss):
    """Negative log-likelihood of log-probabilities (n, classes, ...) with class numbers of any integer type."""

    def __init__(self, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean") -> None:
        nn.NLLLoss.__init__(self, weight, ignore_index=ignore_index, reduction=reduction)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        return super().forward(input, as_classes(target))
