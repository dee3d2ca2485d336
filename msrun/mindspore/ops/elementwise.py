"""Operators that work on each element, and those of torch whose arguments are MindSpore's: the table."""

from __future__ import annotations

import functools
import re
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
outer=ger,Ger complex=Complex diag=Diag,DiagPart,diag_part matmul=bmm,batch_matmul det=MatrixDeterminant
"""
"""torch's function, which is MindSpore's with the same arguments, and further names of MindSpore's."""

IN_WORDS = """
prelu=PReLU(input weight) softplus=Softplus(input beta=1 threshold=20) hardtanh(input min_val=-1.0 max_val=1.0)
threshold(input thr>threshold value) leaky_relu(input alpha>negative_slope=0.2) glu(x>input axis>dim=-1)
dropout(input p=0.5 training=True seed>=None) dropout2d(input p=0.5 training=True) swapaxes(input axis0 axis1)
swapdims(input dim0 dim1) moveaxis=movedim(x>input source destination) unbind(input dim=0) unsqueeze(input dim)
rot90(input k dims) masked_select=MaskedSelect(input mask) where=Select,select(condition input other)
diagonal(input offset=0 dim1=0 dim2=1) nonzero=NonZero(input * as_tuple=False) ones_like=OnesLike(input * dtype=None)
zeros_like=ZerosLike(input * dtype=None) full_like(input fill_value * dtype=None) hstack(tensors) dstack(tensors)
vstack(inputs>tensors) column_stack(tensors) chunk(input chunks axis>dim=0) narrow(input axis>dim start length)
repeat_interleave(input repeats axis>dim=None)
searchsorted(sorted_sequence values>input * out_int32=False right=False) histc(input bins=100 min=0.0 max=0.0)
diff(x>input n=1 axis>dim=-1 prepend=None append=None) logsumexp(input dim keepdim=False)
pixel_shuffle(input upscale_factor) pixel_unshuffle(input downscale_factor) addmm(input mat1 mat2 * beta=1 alpha=1)
baddbmm(input batch1 batch2 beta=1 alpha=1) tensordot=tensor_dot(x1>a x2>b axes>dims)
cosine_similarity(x1 x2 dim=1 eps=1e-8) normalize(input p=2.0 dim=1 eps=1e-12)
layer_norm(input normalized_shape weight=None bias=None eps=1e-5)
group_norm(input num_groups weight=None bias=None eps=1e-5) adaptive_avg_pool1d(input output_size)
adaptive_avg_pool3d(input output_size) unfold(input kernel_size dilation=1 padding=0 stride=1)
fold(input output_size kernel_size dilation=1 padding=0 stride=1) mse_loss(input target reduction='mean')
l1_loss(input target reduction='mean') huber_loss(input target reduction='mean' delta=1.0)
hinge_embedding_loss(inputs>input targets>target margin=1.0 reduction='mean')
margin_ranking_loss(input1 input2 target margin=0.0 reduction='mean')
cosine_embedding_loss(input1 input2 target margin=0.0 reduction='mean')
soft_margin_loss(input target reduction='mean') rand_like(input seed>=None * dtype=None)
randn_like(input seed>=None * dtype=None) multinomial(input num_samples replacement=True seed>=None)
"""
"""The same with MindSpore's arguments, in the words of `taking`."""

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
for _name, _more, _words in re.findall(r"(\w+)=?([\w,]*)\(([^)]*)\)", IN_WORDS):
    _function = taking(_words, getattr(F, _name, None) or getattr(torch, _name))
    OPERATORS |= define(f"{_more.replace(',', ' ')} {_name}", _function)
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
    ("HShrink hardshrink", lambda input, lambd=0.5: F.hardshrink(input, lambd), "lambd"),
    ("SoftShrink soft_shrink softshrink", lambda input, lambd=0.5: F.softshrink(input, lambd), "lambd"),
    ("IsClose isclose", taking("input other rtol=1e-5 atol=1e-8 equal_nan=False", torch.isclose),
     "rtol atol equal_nan"),
    ("Logit logit", lambda input, eps=-1.0: torch.logit(input, eps if eps is not None and eps >= 0 else None), "eps"),
    ("NanToNum nan_to_num", taking("input nan=None posinf=None neginf=None", torch.nan_to_num), "nan posinf neginf"),
    ("FloatStatus", lambda x: (~torch.isfinite(x)).any().float().reshape(1)),
    ("mixed_precision_cast", lambda dst_dtype, x: x.to(dst_dtype) if x.is_floating_point() else x),
    ("identity Identity", lambda x: x),
    ("StopGradient stop_gradient", lambda value: value.detach() if isinstance(value, Tensor) else value),
    ("Cast cast", lambda input, dtype: input.to(dtype) if isinstance(input, Tensor) else torch.tensor(
        input, dtype=dtype)),
))  # fmt: skip
