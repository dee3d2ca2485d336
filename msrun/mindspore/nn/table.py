"""Layers without weights of their own, padding, pools that adapt, cells of recurrent networks and losses: the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import UsageError, near_miss
from msrun.mindspore.initializer import begin
from msrun.mindspore.nn.cells import Cell
from msrun.mindspore.ops import OPERATORS
from msrun.mindspore.ops.neural import as_classes
from msrun.mindspore.ops.table import taking


class Made(Cell):
    """A cell whose arguments are said in words, see `taking`; weight_init and bias_init fill its parameters."""

    words = ""
    arguments: Callable[..., dict[str, Any]]

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "words" in vars(cls):
            cls.arguments = staticmethod(taking(cls.words, dict, f"nn.{cls.__name__}"))

    def __init__(self, *args: Any, **settings: Any) -> None:
        given = type(self).arguments(*args, **settings)
        first = given.pop("weight_init", None), given.pop("bias_init", None)
        super(Cell, self).__init__(**self._torchs(given))
        begin(self, *first)

    def _torchs(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of torch's class; those that a subclass keeps go to `vars(self)`."""
        return given


class _OfClasses(Made):
    """A loss of scores (n, classes, ...) with class numbers of any integer type, or probabilities."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        return super().forward(input, as_classes(target))


class _OfOperator(Made):
    operator: Callable[..., Any]

    def _torchs(self, given: dict[str, Any]) -> dict[str, Any]:
        vars(self)["_settings"] = given
        return {}

    def forward(self, *inputs: Any) -> Any:
        """Return what the operator computes."""
        return type(self).operator(*inputs, **self._settings)


def _made(name: str, bases: tuple[type, ...], words: Any, doc: str, **body: Any) -> type[nn.Module]:
    body |= {"words": words} if isinstance(words, str) else {"arguments": staticmethod(words)}
    if "gamma_init" in str(words):
        body["mindspores_names"] = {"weight": "gamma", "bias": "beta"}
    return type(name, bases, {**body, "__doc__": doc, "__module__": "msrun.mindspore.nn"})


_OF_CELL = "input_size hidden_size has_bias>bias=True"
_AFFINE = "affine=True gamma_init>weight_init='ones' beta_init>bias_init='zeros' dtype=float32"
_OF_ATTENTION = """
embed_dim num_heads dropout=0.0 has_bias>bias=True add_bias_kv=False add_zero_attn=False kdim=None vdim=None
batch_first=False dtype=float32
"""
_OF_TRANSFORMER = """
d_model nhead dim_feedforward=2048 dropout=0.1 activation='relu' layer_norm_eps=1e-5 batch_first=False
norm_first=False dtype=float32
"""
OF_TORCH: tuple[tuple[str, Any], ...] = (
    ("ReLU ReLU6 Sigmoid Tanh Mish LogSigmoid Softsign Tanhshrink Softmax2d SiLU", ""),
    ("SeLU:SELU HSwish:Hardswish HSigmoid:Hardsigmoid", ""),
    ("Softmax LogSoftmax Softmin GLU", "axis>dim=-1"),
    ("Flatten", "start_dim=1 end_dim=-1"),
    ("Unflatten", "axis>dim unflattened_size"),
    ("GELU", taking("approximate=True", lambda approximate: {"approximate": "tanh" if approximate else "none"},
        "nn.GELU")),
    ("Identity", lambda *args, **settings: {}),
    ("LeakyReLU", "alpha>negative_slope=0.2"),
    ("ELU CELU", "alpha=1.0"),
    ("HShrink:Hardshrink SoftShrink:Softshrink", "lambd=0.5"),
    ("Hardtanh", "min_val=-1.0 max_val=1.0"),
    ("Threshold", "threshold value"),
    ("PReLU", taking("channel=1 w=0.25", lambda channel, w: {"num_parameters": channel, "init": float(w)}, "nn.PReLU")),
    ("Dropout1d Dropout2d Dropout3d", "p=0.5"),
    ("AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d", "output_size"),
    ("AdaptiveMaxPool2d", "output_size return_indices=False"),
    ("ConstantPad1d ConstantPad2d ConstantPad3d", "padding value"),
    ("ZeroPad2d ReflectionPad1d ReflectionPad2d ReflectionPad3d", "padding"),
    ("ReplicationPad1d ReplicationPad2d ReplicationPad3d", "padding"),
    ("PixelShuffle", "upscale_factor"),
    ("PixelUnshuffle", "downscale_factor"),
    ("ChannelShuffle", "groups"),
    ("Upsample", "size=None scale_factor=None mode='nearest' align_corners=None recompute_scale_factor=None"),
    ("LSTMCell GRUCell", f"{_OF_CELL} dtype=float32"),
    ("RNNCell", f"{_OF_CELL} nonlinearity='tanh' dtype=float32"),
    ("GroupNorm", f"num_groups num_channels eps=1e-5 {_AFFINE}"),
    ("InstanceNorm1d InstanceNorm2d InstanceNorm3d", f"num_features eps=1e-5 momentum=0.1 {_AFFINE}"),
    ("MultiheadAttention", _OF_ATTENTION),
    ("TransformerEncoderLayer TransformerDecoderLayer", _OF_TRANSFORMER),
    ("TransformerEncoder", taking("encoder_layer num_layers norm=None",
        lambda **given: {**given, "enable_nested_tensor": False}, "nn.TransformerEncoder")),
    ("TransformerDecoder", "decoder_layer num_layers norm=None"),
    ("MSELoss L1Loss MAELoss:L1Loss KLDivLoss SoftMarginLoss", "reduction='mean'"),
    ("SmoothL1Loss", "beta=1.0 reduction='none'"),
    ("HuberLoss", "reduction='mean' delta=1.0"),
    ("BCELoss MultiLabelSoftMarginLoss", "weight=None reduction='mean'"),
    ("BCEWithLogitsLoss", "reduction='mean' weight=None pos_weight=None"),
    ("CosineEmbeddingLoss MarginRankingLoss", "margin=0.0 reduction='mean'"),
    ("HingeEmbeddingLoss", "margin=1.0 reduction='mean'"),
    ("TripletMarginLoss", "p=2 swap=False eps=1e-6 reduction='mean' margin=1.0"),
    ("GaussianNLLLoss", "* full=False eps=1e-6 reduction='mean'"),
    ("PoissonNLLLoss", "log_input=True full=False eps=1e-8 reduction='mean'"),
    ("CrossEntropyLoss", "weight=None ignore_index=-100 reduction='mean' label_smoothing=0.0"),
    ("NLLLoss", "weight=None ignore_index=-100 reduction='mean'"),
)  # fmt: skip
"""MindSpore's layers, each with torch's name where it is another one, and their arguments as torch's class has them."""


def _clip_by_norm(x: Tensor, clip_norm: Any, axis: Any = None) -> Tensor:
    norm = OPERATORS["reduce_sum"](x * x, axis, True).sqrt()
    return x * clip_norm / torch.maximum(norm, torch.as_tensor(clip_norm, dtype=norm.dtype))


def _resize(
    x: Tensor, size: Any = None, scale_factor: Any = None, align_corners: bool = False, half_pixel_centers: bool = False
) -> Tensor:
    size = [int(side * scale_factor) for side in x.shape[2:]] if size is None else size
    return OPERATORS["ResizeBilinear"].function(x, size, align_corners, half_pixel_centers)


OF_OPERATORS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("FastGelu", OPERATORS["fast_gelu"], ""),
    ("Pad", OPERATORS["mirror_pad"], "paddings mode='CONSTANT'"),
    ("ResizeBilinear", _resize, "half_pixel_centers=False"),
    ("OneHot", OPERATORS["one_hot"], "axis=-1 depth=1 on_value=1.0 off_value=0.0 dtype>=float32"),
    ("Norm", lambda x, **words: OPERATORS["reduce_sum"](x * x, **words).sqrt(), "axis=() keep_dims=False"),
    ("ReduceLogSumExp", OPERATORS["logsumexp"], "axis>dim keep_dims>keepdim=False"),
    ("Roll", OPERATORS["roll"], "shift>shifts axis>dims"),
    ("MatMul", OPERATORS["MatMul"].function, "transpose_x1>transpose_a=False transpose_x2>transpose_b=False"),
    ("Tril", OPERATORS["tril"], ""),
    ("Triu", OPERATORS["triu"], ""),
    ("PSNR", lambda img1, img2, max_val: -10 * torch.log10(
        (img1 / max_val - img2 / max_val).square().mean((-3, -2, -1))), "max_val=1.0"),
    ("ClipByNorm", _clip_by_norm, "axis=None"),
)  # fmt: skip
"""MindSpore's layer, the operator that it calls, and the layer's arguments as the operator has them."""

LAYERS: dict[str, type[nn.Module]] = {}
for _names, _words in OF_TORCH:
    for _name, _, _theirs in (one.partition(":") for one in _names.split()):
        _kind = _OfClasses if _name in ("CrossEntropyLoss", "NLLLoss") else Made
        _base = getattr(nn, _theirs or _name)
        LAYERS[_name] = _made(_name, (_kind, _base), _words, f"torch.nn.{_base.__name__} with MindSpore's arguments.")
for _name, _operator, _words in OF_OPERATORS:
    LAYERS[_name] = _made(_name, (_OfOperator,), _words, f"`{_name}`, a cell.", operator=staticmethod(_operator))

ACTIVATIONS = {"fast_gelu": "FastGelu"} | {
    name.lower(): name
    for name in """
    Softmax LogSoftmax ReLU ReLU6 Tanh GELU ELU Sigmoid PReLU LeakyReLU HSwish HSigmoid LogSigmoid Softsign SoftShrink
    HShrink SiLU Mish SeLU
    """.split()
}
"""MindSpore's words for activations."""


def get_activation(name: str, prim_name: str | None = None) -> nn.Module:
    """Return a new layer of an activation.

    Raises:
        UsageError: an unknown word.
    """
    if name not in ACTIVATIONS:
        raise UsageError(f"activation {name!r}: unknown{near_miss(name, ACTIVATIONS)}; one of {', '.join(ACTIVATIONS)}")
    return LAYERS[ACTIVATIONS[name]]()
