"""mindspore.numpy: numpy's functions on tensors, by torch's own implementation of numpy's interface."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch._numpy as torch_numpy
from torch import Tensor
from torch.utils import _pytree as pytree

from msrun.mindspore.dtype import as_dtype, bool_, float16, float32, float64, int8, int16, int32, int64, uint8  # noqa: F401
from msrun.mindspore.missing import missing_names
from msrun.mindspore.ops import shapes
from msrun.mindspore.ops.table import taking

_ndarray: Any = vars(torch_numpy)["ndarray"]
pi, e, euler_gamma, inf, nan, newaxis = np.pi, np.e, np.euler_gamma, np.inf, np.nan, None

NAMES = """
abs absolute add all amax amin any append arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax
argmin argsort array_equal array_split asarray atleast_1d atleast_2d atleast_3d average bincount bitwise_and
bitwise_not bitwise_or bitwise_xor broadcast_arrays broadcast_to cbrt ceil clip column_stack concatenate
convolve copysign corrcoef cos cosh count_nonzero cov cross cumprod cumsum deg2rad diag diag_indices diagflat
diagonal diff divide divmod dot dsplit dstack einsum empty empty_like equal exp exp2 expand_dims expm1 eye fix
flip fliplr flipud float_power floor floor_divide fmax fmin fmod full full_like gcd geomspace greater
greater_equal hamming hanning heaviside histogram hsplit hstack hypot identity indices inner invert isclose
isfinite isinf isnan isscalar kron lcm less less_equal linspace log log10 log1p log2 logaddexp logaddexp2
logical_and logical_not logical_or logical_xor logspace matmul max maximum mean median meshgrid min minimum mod
moveaxis multiply nan_to_num negative nonzero not_equal ones ones_like outer pad positive power prod ptp put
rad2deg radians ravel real imag reciprocal remainder repeat reshape result_type rint roll rollaxis rot90 round
searchsorted sign signbit sin sinh size sort split sqrt square squeeze stack std subtract sum swapaxes take
take_along_axis tan tanh tensordot tile trace transpose tri tril tril_indices triu triu_indices true_divide
trunc unique vander var vdot vsplit vstack where zeros zeros_like bartlett blackman
""".split()
"""Functions that torch implements, and that MindSpore has under the same name."""


def _numpys(name: str) -> Callable[..., Any]:
    function = getattr(torch_numpy, name)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        kind, is_double = kwargs.get("dtype"), _has_float64((args, kwargs))
        if kind is not None:
            kwargs["dtype"] = getattr(torch_numpy, str(as_dtype(kind)).removeprefix("torch.").replace("bool", "bool_"))
        args, kwargs = pytree.tree_map_only(Tensor, _ndarray, (args, kwargs))
        result = pytree.tree_map_only(_ndarray, lambda found: found.tensor, function(*args, **kwargs))
        is_float = isinstance(result, Tensor) and result.dtype == torch.float64
        if name == "arange" and kind is None and not is_float:
            return result.int()
        if kind is None and is_float and not is_double:
            return result.float()
        return result

    run.__module__ = __name__
    return run


def _has_float64(values: Any) -> bool:
    kinds = (torch.float64, np.float64)
    return builtins.any(getattr(one, "dtype", None) in kinds for one in pytree.tree_leaves(values))


FUNCTIONS: dict[str, Callable[..., Any]] = {name: _numpys(name) for name in NAMES if hasattr(torch_numpy, name)}
globals().update(FUNCTIONS)


def array(obj: Any, dtype: Any = None, copy: bool = True, ndmin: int = 0) -> Tensor:
    """Return a new tensor of numbers; of Python's floats in float32."""
    tensor = obj.detach() if isinstance(obj, Tensor) else torch.as_tensor(np.asarray(obj))
    if dtype is not None:
        tensor = tensor.to(as_dtype(dtype))
    elif tensor.dtype == torch.float64 and not _has_float64([obj]):
        tensor = tensor.float()
    tensor = tensor.clone() if copy else tensor
    return tensor.reshape((1,) * (ndmin - tensor.dim()) + tuple(tensor.shape))


def rand(*shape: int, dtype: Any = float32) -> Tensor:
    """Return numbers from 0 to 1."""
    return torch.rand(shape, dtype=as_dtype(dtype))


def randn(*shape: int, dtype: Any = float32) -> Tensor:
    """Return normal numbers."""
    return torch.randn(shape, dtype=as_dtype(dtype))


def randint(minval: int, maxval: int | None = None, shape: Any = (), dtype: Any = int32) -> Tensor:
    """Return whole numbers from minval to maxval - 1, or from 0 to minval - 1."""
    low, high = (0, minval) if maxval is None else (minval, maxval)
    return torch.randint(low, high, (shape,) if isinstance(shape, int) else tuple(shape), dtype=as_dtype(dtype))


def isin(element: Tensor, test_elements: Any, invert: bool = False) -> Tensor:
    """Tell of each element whether it is among others."""
    return torch.isin(element, torch.as_tensor(test_elements), invert=invert)


def unique(x: Tensor, return_inverse: bool = False) -> Any:
    """Return the different elements, in the order in which they come."""
    values, places = shapes.OPERATORS["unique"](x)
    return (values, places) if return_inverse else values


def select(condlist: Any, choicelist: Any, default: Any = 0) -> Tensor:
    """Return of each place the first choice whose condition holds."""
    result = torch.full_like(torch.as_tensor(choicelist[0]), default)
    for condition, choice in zip(reversed(list(condlist)), reversed(list(choicelist)), strict=True):
        result = torch.where(torch.as_tensor(condition), torch.as_tensor(choice), result)
    return result


norm = taking("x>input ord=None axis>dim=None keepdims>keepdim=False", torch.linalg.norm)
fabs, nansum, nanmean = torch.abs, torch.nansum, torch.nanmean
isneginf, isposinf = torch.isneginf, torch.isposinf

__all__ = [
    *FUNCTIONS,
    *"array fabs isin isneginf isposinf nanmean nansum norm rand randint randn select bool_".split(),
    *"float16 float32 float64 int8 int16 int32 int64 uint8 e euler_gamma inf nan newaxis pi".split(),
]
__getattr__ = missing_names("numpy", __all__)
