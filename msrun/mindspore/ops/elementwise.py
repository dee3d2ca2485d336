"""Operators that work on each element, and those of torch whose arguments are MindSpore's: the table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msrun.mindspore.ops.table import define, define_all, taking

AS_THEY_ARE = """
abs=Abs,absolute acos=ACos,arccos acosh=Acosh,arccosh angle=Angle asin=Asin,arcsin asinh=Asinh,arcsinh
atan=Atan,arctan atanh=Atanh,arctanh bitwise_not=Invert,invert ceil=Ceil conj=Conj cos=Cos cosh=Cosh digamma=Digamma
erf=Erf erfc=Erfc erfinv=Erfinv exp=Exp exp2 expm1=Expm1 floor=Floor frac imag=Imag isfinite=IsFinite isinf=IsInf
isnan=IsNan lgamma=Lgamma log=Log log10 log1p=Log1p log2 logical_not=LogicalNot neg=Neg,negative positive real=Real
reciprocal=Reciprocal,Inv,inv,inverse_elements round=Round,Rint,rint rsqrt=Rsqrt sign=Sign sin=Sin sinc=Sinc
sinh=Sinh sqrt=Sqrt square=Square tan=Tan tanh=Tanh trunc=Trunc sigmoid=Sigmoid hardsigmoid=HSigmoid
hardswish=HSwish logsigmoid=LogSigmoid mish=Mish relu6=ReLU6 selu=SeLU silu=SiLU softsign=Softsign tanhshrink
relu=ReLU deg2rad rad2deg is_floating_point isreal signbit sgn lerp=Lerp bitwise_left_shift=LeftShift
bitwise_right_shift=RightShift mm mv inner kron block_diag fliplr flipud trace=Trace argwhere bincount msort
outer=ger,Ger complex=Complex prelu=PReLU softplus=Softplus hardtanh swapaxes swapdims unbind unsqueeze rot90
masked_select=MaskedSelect where=Select,select diag=Diag,DiagPart,diag_part diagonal nonzero=NonZero ones_like=OnesLike
zeros_like=ZerosLike full_like hstack dstack column_stack logsumexp histc matmul=bmm,batch_matmul addmm einsum
det=MatrixDeterminant cosine_similarity normalize unfold fold adaptive_avg_pool1d adaptive_avg_pool3d dropout2d
"""
"""torch's function, which is MindSpore's with the same arguments, and further names of MindSpore's."""

BINARY = """
add=Add,TensorAdd atan2=Atan2,arctan2 bitwise_and=BitwiseAnd bitwise_or=BitwiseOr bitwise_xor=BitwiseXor copysign
div=Div,RealDiv,divide,true_divide eq=Equal,equal float_power floor_divide=FloorDiv,floor_div fmax fmin
fmod=Mod,TruncateMod,truncate_mod gcd ge=GreaterEqual,greater_equal gt=Greater,greater heaviside=Heaviside
hypot=Hypot lcm=Lcm le=LessEqual,less_equal logaddexp logaddexp2 logical_and=LogicalAnd logical_or=LogicalOr
logical_xor=LogicalXor lt=Less,less maximum=Maximum minimum=Minimum mul=Mul,multiply ne=NotEqual,not_equal
nextafter=NextAfter pow=Pow,pows,tensor_pow remainder=FloorMod,floor_mod sub=Sub,subtract xlogy=Xlogy
"""
"""The same of functions of two tensors; one of the two may be a number."""


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
    torch.maximum, torch.minimum, torch.logical_and, torch.logical_or, torch.logical_xor, torch.atan2, torch.hypot,
    torch.fmax, torch.fmin, torch.logaddexp, torch.logaddexp2, torch.gcd, torch.lcm, torch.nextafter, torch.heaviside,
)  # fmt: skip
"""Of torch's functions of two those that take no number."""


def _beside(number: Any, tensor: Tensor) -> torch.dtype:
    """Return the type that a number takes beside a tensor: the tensor's, unless it cannot hold the number."""
    if isinstance(number, float) and not tensor.is_floating_point() and not tensor.is_complex():
        return torch.get_default_dtype()
    return tensor.dtype if not isinstance(number, bool) else torch.bool


def clip_by_value(x: Any, clip_value_min: Any = None, clip_value_max: Any = None) -> Any:
    """Return the elements, not below the smallest value and not above the largest; of a list of tensors each."""
    if isinstance(x, list | tuple):
        return type(x)(clip_by_value(one, clip_value_min, clip_value_max) for one in x)
    for bound, choose in ((clip_value_min, torch.maximum), (clip_value_max, torch.minimum)):
        if bound is not None:
            x = choose(x, torch.as_tensor(bound, device=x.device).to(x.dtype))
    return x


OPERATORS: dict[str, Any] = {}
for _rows, _made in ((AS_THEY_ARE, lambda function: function), (BINARY, of_two)):
    for _name, _, _more in (row.partition("=") for row in _rows.split()):
        OPERATORS |= define(
            f"{_more.replace(',', ' ')} {_name}", _made(getattr(torch, _name, None) or getattr(F, _name))
        )
OPERATORS |= define_all((
    ("AddN AccumulateNV2 addn accumulate_n", lambda x: functools.reduce(torch.add, x)),
    ("Addcdiv addcdiv", lambda input, tensor1, tensor2, value=1: input + value * (tensor1 / tensor2)),
    ("Addcmul addcmul", lambda input, tensor1, tensor2, value=1: input + value * (tensor1 * tensor2)),
    ("ApproximateEqual approximate_equal", lambda x, y, tolerance=1e-5: (x - y).abs() < tolerance, "tolerance"),
    ("CeLU celu", lambda x, alpha=1.0: F.celu(x, alpha), "alpha"),
    ("clip_by_value", clip_by_value),
    ("clamp clip", lambda input, min=None, max=None: clip_by_value(input, min, max)),
    ("TruncateDiv truncate_div", lambda x, y: of_two(torch.div)(x, y, rounding_mode="trunc")),
    ("DivNoNan div_no_nan", lambda x, y: torch.where(y == 0, torch.zeros_like(x), x / torch.where(
        y == 0, torch.ones_like(y), y))),
    ("MulNoNan", lambda x, y: torch.where(y == 0, torch.zeros_like(x), x * y)),
    ("Xdivy xdivy", lambda x, y: torch.where(x == 0, torch.zeros_like(x), x / y)),
    ("SquaredDifference", lambda x, y: torch.square(x - y)),
    ("Elu elu", lambda input_x, alpha=1.0: F.elu(input_x, alpha), "alpha"),
    ("GeLU Gelu", lambda input: F.gelu(input, approximate="tanh")),
    ("FastGeLU FastGelu fast_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
    ("gelu", lambda input, approximate="none": F.gelu(input, approximate=approximate)),
    ("glu", lambda x, axis=-1: F.glu(x, axis)),
    ("HShrink hardshrink", lambda input, lambd=0.5: F.hardshrink(input, lambd), "lambd"),
    ("SoftShrink soft_shrink softshrink", lambda input, lambd=0.5: F.softshrink(input, lambd), "lambd"),
    ("leaky_relu", lambda input, alpha=0.2: F.leaky_relu(input, alpha)),
    ("threshold", lambda input, thr, value: F.threshold(input, thr, value)),
    ("IsClose isclose", taking("input other rtol=1e-5 atol=1e-8 equal_nan=False", torch.isclose),
     "rtol atol equal_nan"),
    ("Logit logit", lambda input, eps=-1.0: torch.logit(input, eps if eps is not None and eps >= 0 else None), "eps"),
    ("NanToNum nan_to_num", taking("input nan=None posinf=None neginf=None", torch.nan_to_num), "nan posinf neginf"),
    ("FloatStatus", lambda x: (~torch.isfinite(x)).any().float().reshape(1)),
    ("mixed_precision_cast", lambda dst_dtype, x: x.to(dst_dtype) if x.is_floating_point() else x),
    ("identity Identity", lambda x: x),
    ("dropout", taking("input p=0.5 training=True seed>=None", F.dropout)),
    ("StopGradient stop_gradient", lambda value: value.detach() if isinstance(value, Tensor) else value),
    ("Cast cast", lambda input, dtype: input.to(dtype) if isinstance(input, Tensor) else torch.tensor(
        input, dtype=dtype)),
))  # fmt: skip
