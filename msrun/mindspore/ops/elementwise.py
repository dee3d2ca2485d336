"""Operators that work on each element: the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msrun.mindspore.ops.table import define

UNARY: dict[Callable[..., Any], str] = {
    torch.abs: "Abs abs absolute",
    torch.acos: "ACos acos arccos",
    torch.acosh: "Acosh acosh arccosh",
    torch.angle: "Angle angle",
    torch.asin: "Asin asin arcsin",
    torch.asinh: "Asinh asinh arcsinh",
    torch.atan: "Atan atan arctan",
    torch.atanh: "Atanh atanh arctanh",
    torch.bitwise_not: "Invert invert bitwise_not",
    torch.ceil: "Ceil ceil",
    torch.conj: "Conj conj",
    torch.cos: "Cos cos",
    torch.cosh: "Cosh cosh",
    torch.digamma: "Digamma digamma",
    torch.erf: "Erf erf",
    torch.erfc: "Erfc erfc",
    torch.erfinv: "Erfinv erfinv",
    torch.exp: "Exp exp",
    torch.exp2: "exp2",
    torch.expm1: "Expm1 expm1",
    torch.floor: "Floor floor",
    torch.frac: "frac",
    torch.imag: "Imag imag",
    torch.isfinite: "IsFinite isfinite",
    torch.isinf: "IsInf isinf",
    torch.isnan: "IsNan isnan",
    torch.lgamma: "Lgamma lgamma",
    torch.log: "Log log",
    torch.log10: "log10",
    torch.log1p: "Log1p log1p",
    torch.log2: "log2",
    torch.logical_not: "LogicalNot logical_not",
    torch.neg: "Neg neg negative",
    torch.positive: "positive",
    torch.real: "Real real",
    torch.reciprocal: "Reciprocal Inv reciprocal inv inverse_elements",
    torch.round: "Round Rint round rint",
    torch.rsqrt: "Rsqrt rsqrt",
    torch.sign: "Sign sign",
    torch.sin: "Sin sin",
    torch.sinc: "Sinc sinc",
    torch.sinh: "Sinh sinh",
    torch.sqrt: "Sqrt sqrt",
    torch.square: "Square square",
    torch.tan: "Tan tan",
    torch.tanh: "Tanh tanh",
    torch.trunc: "Trunc trunc",
    torch.sigmoid: "Sigmoid sigmoid",
    F.hardsigmoid: "HSigmoid hardsigmoid",
    F.hardswish: "HSwish hardswish",
    F.logsigmoid: "LogSigmoid logsigmoid",
    F.mish: "Mish mish",
    F.relu6: "ReLU6 relu6",
    F.selu: "SeLU selu",
    F.silu: "SiLU silu",
    F.softsign: "Softsign softsign",
    F.tanhshrink: "tanhshrink",
}
"""torch's function of one tensor -> MindSpore's names."""

BINARY: dict[Callable[..., Any], str] = {
    torch.add: "Add TensorAdd add",
    torch.atan2: "Atan2 atan2 arctan2",
    torch.bitwise_and: "BitwiseAnd bitwise_and",
    torch.bitwise_or: "BitwiseOr bitwise_or",
    torch.bitwise_xor: "BitwiseXor bitwise_xor",
    torch.copysign: "copysign",
    torch.div: "Div RealDiv div divide true_divide",
    torch.eq: "Equal equal eq",
    torch.float_power: "float_power",
    torch.floor_divide: "FloorDiv floor_div floor_divide",
    torch.fmax: "fmax",
    torch.fmin: "fmin",
    torch.fmod: "Mod TruncateMod truncate_mod fmod",
    torch.gcd: "gcd",
    torch.ge: "GreaterEqual greater_equal ge",
    torch.gt: "Greater greater gt",
    torch.heaviside: "Heaviside heaviside",
    torch.hypot: "Hypot hypot",
    torch.lcm: "Lcm lcm",
    torch.le: "LessEqual less_equal le",
    torch.logaddexp: "logaddexp",
    torch.logaddexp2: "logaddexp2",
    torch.logical_and: "LogicalAnd logical_and",
    torch.logical_or: "LogicalOr logical_or",
    torch.logical_xor: "LogicalXor logical_xor",
    torch.lt: "Less less lt",
    torch.maximum: "Maximum maximum",
    torch.minimum: "Minimum minimum",
    torch.mul: "Mul mul multiply",
    torch.ne: "NotEqual not_equal ne",
    torch.nextafter: "NextAfter nextafter",
    torch.pow: "Pow pow pows tensor_pow",
    torch.remainder: "FloorMod floor_mod remainder",
    torch.sub: "Sub sub subtract",
    torch.xlogy: "Xlogy xlogy",
}
"""torch's function of two tensors -> MindSpore's names; one of the two may be a number."""


def of_two(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function of two tensors, of which one may be a number."""

    def run(input: Any, other: Any, **settings: Any) -> Any:
        if not isinstance(input, Tensor):
            if not isinstance(other, Tensor):
                input, other = torch.tensor(input), torch.tensor(other)
            else:
                input = torch.tensor(input, dtype=_beside(input, other), device=other.device)
        elif not isinstance(other, Tensor) and function in _OF_TENSORS:
            other = torch.tensor(other, dtype=_beside(other, input), device=input.device)
        return function(input, other, **settings)

    run.__name__ = run.__qualname__ = function.__name__
    return run


_OF_TENSORS = (
    *(torch.maximum, torch.minimum, torch.logical_and, torch.logical_or, torch.logical_xor, torch.atan2, torch.hypot),
    *(
        torch.fmax,
        torch.fmin,
        torch.logaddexp,
        torch.logaddexp2,
        torch.gcd,
        torch.lcm,
        torch.nextafter,
        torch.heaviside,
    ),
)
"""Of torch's functions of two those that take no number."""


def _beside(number: Any, tensor: Tensor) -> torch.dtype:
    """Return the type that a number takes beside a tensor: the tensor's, unless it cannot hold the number."""
    if isinstance(number, float) and not tensor.is_floating_point() and not tensor.is_complex():
        return torch.get_default_dtype()
    return tensor.dtype if not isinstance(number, bool) else torch.bool


def _divide_to_zero(x: Any, y: Any) -> Any:
    return of_two(torch.div)(x, y, rounding_mode="trunc")


def _divide_or_zero(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(y == 0, torch.zeros_like(x), x / torch.where(y == 0, torch.ones_like(y), y))


def clip_by_value(x: Any, clip_value_min: Any = None, clip_value_max: Any = None) -> Any:
    """Return the elements, not below the smallest value and not above the largest; of a list of tensors each."""
    if isinstance(x, list | tuple):
        return type(x)(clip_by_value(one, clip_value_min, clip_value_max) for one in x)
    for bound, choose in ((clip_value_min, torch.maximum), (clip_value_max, torch.minimum)):
        if bound is not None:
            x = choose(x, torch.as_tensor(bound, device=x.device).to(x.dtype))
    return x


def add_all(x: Any) -> Tensor:
    """Return the sum of several tensors."""
    first, *others = x
    for other in others:
        first = first + other
    return first


def apply_dropout(input: Tensor, p: float = 0.5, training: bool = True, seed: int | None = None) -> Tensor:
    """Zero elements with probability `p`, and multiply the others by 1 / (1 - p)."""
    del seed
    return F.dropout(input, p, training)


OPERATORS: dict[str, Any] = {}
for _function, _names in UNARY.items():
    OPERATORS |= define(_names, _function)
for _function, _names in BINARY.items():
    OPERATORS |= define(_names, of_two(_function))
for _row in (
    ("ReLU relu", torch.relu),
    ("AddN AccumulateNV2 addn accumulate_n", add_all),
    ("Addcdiv addcdiv", lambda input, tensor1, tensor2, value=1: input + value * (tensor1 / tensor2)),
    ("Addcmul addcmul", lambda input, tensor1, tensor2, value=1: input + value * (tensor1 * tensor2)),
    ("ApproximateEqual approximate_equal", lambda x, y, tolerance=1e-5: (x - y).abs() < tolerance, "tolerance"),
    ("CeLU celu", lambda x, alpha=1.0: F.celu(x, alpha), "alpha"),
    ("clip_by_value", clip_by_value),
    ("clamp clip", lambda input, min=None, max=None: clip_by_value(input, min, max)),
    ("TruncateDiv truncate_div", _divide_to_zero),
    ("DivNoNan div_no_nan", _divide_or_zero),
    ("MulNoNan", lambda x, y: torch.where(y == 0, torch.zeros_like(x), x * y)),
    ("Xdivy xdivy", lambda x, y: torch.where(x == 0, torch.zeros_like(x), x / y)),
    ("SquaredDifference", lambda x, y: torch.square(x - y)),
    ("LeftShift bitwise_left_shift", torch.bitwise_left_shift),
    ("RightShift bitwise_right_shift", torch.bitwise_right_shift),
    ("Elu elu", lambda input_x, alpha=1.0: F.elu(input_x, alpha), "alpha"),
    ("GeLU Gelu", lambda input: F.gelu(input, approximate="tanh")),
    ("FastGeLU FastGelu fast_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
    ("gelu", lambda input, approximate="none": F.gelu(input, approximate=approximate)),
    ("glu", lambda x, axis=-1: F.glu(x, axis)),
    ("HShrink hardshrink", lambda input, lambd=0.5: F.hardshrink(input, lambd), "lambd"),
    ("SoftShrink soft_shrink softshrink", lambda input, lambd=0.5: F.softshrink(input, lambd), "lambd"),
    ("hardtanh", lambda input, min_val=-1.0, max_val=1.0: F.hardtanh(input, min_val, max_val)),
    ("leaky_relu", lambda input, alpha=0.2: F.leaky_relu(input, alpha)),
    ("PReLU prelu", lambda input, weight: F.prelu(input, weight)),
    ("Softplus", F.softplus),
    ("softplus", lambda input, beta=1, threshold=20: F.softplus(input, beta, threshold)),
    ("threshold", lambda input, thr, value: F.threshold(input, thr, value)),
    ("IsClose isclose", lambda input, other, rtol=1e-5, atol=1e-8, equal_nan=False: torch.isclose(
        input, other, rtol, atol, equal_nan), "rtol atol equal_nan"),
    ("Lerp lerp", torch.lerp),
    ("Logit logit", lambda input, eps=-1.0: torch.logit(input, eps if eps is not None and eps >= 0 else None), "eps"),
    ("NanToNum nan_to_num", lambda input, nan=None, posinf=None, neginf=None: torch.nan_to_num(
        input, nan, posinf, neginf), "nan posinf neginf"),
    ("Complex", torch.complex),
    ("FloatStatus", lambda x: (~torch.isfinite(x)).any().float().reshape(1)),
    ("mixed_precision_cast", lambda dst_dtype, x: x.to(dst_dtype) if x.is_floating_point() else x),
    ("deg2rad", torch.deg2rad),
    ("rad2deg", torch.rad2deg),
    ("identity Identity", lambda x: x),
    ("dropout", apply_dropout),
    ("is_floating_point", torch.is_floating_point),
    ("isreal", torch.isreal),
    ("signbit", torch.signbit),
    ("sgn", torch.sgn),
    ("StopGradient stop_gradient", lambda value: value.detach() if isinstance(value, Tensor) else value),
    ("Cast cast", lambda input, dtype: input.to(dtype) if isinstance(input, Tensor) else torch.tensor(
        input, dtype=dtype)),
):  # fmt: skip
    OPERATORS |= define(*_row)
