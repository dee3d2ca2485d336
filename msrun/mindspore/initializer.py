"""How weights begin: MindSpore's initializers over torch.nn.init, and the seed of random numbers."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from msrun.data import config
from msrun.errors import UsageError, near_miss
from msrun.mindspore.ops.table import taking


class Initializer:
    """Base: `initializer(tensor)` fills a tensor in place. A subclass of one's own has `_initialize(array)`."""

    def __init__(self, **settings: Any) -> None:
        self._kwargs = settings

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fill a tensor and return it."""
        array = tensor.detach().cpu().numpy().copy()
        self._initialize(array)
        return tensor.copy_(torch.as_tensor(array))

    def _initialize(self, arr: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}._initialize(arr): write it; it fills a numpy array")


def _of(name: str, words: str, fill: str | Callable[..., Tensor], doc: str) -> Any:
    """Return an initializer.

    Args:
        words: its arguments, as in `taking`.
        fill: a function of a tensor and of these; by its name one of torch.nn.init, which is looked up at each call.
    """
    arguments = taking(words, dict, name)

    def __init__(self: Any, *args: Any, **settings: Any) -> None:  # noqa: N807
        given = arguments(*args, **settings)
        vars(self).update(given, _kwargs=given)

    def __call__(self: Any, tensor: Tensor) -> Tensor:  # noqa: N807
        return (getattr(nn.init, fill) if isinstance(fill, str) else fill)(tensor, **self._kwargs)

    body = {"__init__": __init__, "__call__": __call__, "__signature__": inspect.signature(arguments), "__doc__": doc}
    return type(name, (Initializer,), {**body, "__module__": __name__})


def _truncated(tensor: Tensor, sigma: float, mean: float, a: float, b: float) -> Tensor:
    return nn.init.trunc_normal_(tensor, mean, sigma, mean + a * sigma, mean + b * sigma)


def _symmetric(tensor: Tensor, scale: float) -> Tensor:
    return nn.init.uniform_(tensor, -scale, scale)


_OF_HE = "negative_slope>a=0.0 mode='fan_in' nonlinearity='leaky_relu'"
_CUT = "sigma=0.01 mean=0.0 a=-2.0 b=2.0"
Constant = _of("Constant", "value>val", "constant_", "Every element is `value`.")
Zero = _of("Zero", "", "zeros_", "Every element is 0.")
One = _of("One", "", "ones_", "Every element is 1.")
Normal = _of("Normal", "sigma>std=0.01 mean=0.0", "normal_", "Normal; MindSpore's default deviation is 0.01.")
TruncatedNormal = _of("TruncatedNormal", _CUT, _truncated, "Normal, without what is beyond a or b deviations.")
Uniform = _of("Uniform", "scale=0.07", _symmetric, "Uniform in [-scale, scale); MindSpore's default scale is 0.07.")
XavierUniform = _of("XavierUniform", "gain=1.0", "xavier_uniform_", "Uniform in +-gain sqrt(6 / (fan_in + fan_out)).")
XavierNormal = _of("XavierNormal", "gain=1.0", "xavier_normal_", "Normal, deviation gain sqrt(2 / (fan_in + fan_out)).")
HeUniform = _of("HeUniform", _OF_HE, "kaiming_uniform_", "Uniform in +-gain sqrt(3 / fan) (He et al., 2015).")
HeNormal = _of("HeNormal", _OF_HE, "kaiming_normal_", "Normal, of deviation gain / sqrt(fan) (He et al., 2015).")
Identity = _of("Identity", "", "eye_", "Ones on the diagonal.")
Dirac = _of("Dirac", "groups=1", "dirac_", "A convolution's weight that returns its input.")
Orthogonal = _of("Orthogonal", "gain=1.0", "orthogonal_", "Rows or columns at right angles.")


def _calculate_fan_in_and_fan_out(shape: Sequence[int]) -> tuple[int, int]:
    """Return how many elements each output and each input of a weight of this shape meets."""
    return nn.init._calculate_fan_in_and_fan_out(torch.empty(tuple(shape), device="meta"))


def _calculate_correct_fan(shape: Sequence[int], mode: str) -> int:
    return _calculate_fan_in_and_fan_out(shape)[mode == "fan_out"]


def _calculate_gain(nonlinearity: str, param: Any = None) -> float:
    return nn.init.calculate_gain(nonlinearity, param)  # type: ignore[arg-type]


def _assignment(arr: Any, num: Any) -> Any:
    """Fill a numpy array with numbers of its shape, or with one, and return it."""
    arr[...] = num
    return arr


NAMES: dict[str, type[Initializer]] = {"zeros": Zero, "ones": One} | {
    word: kind
    for kind in (
        *(Identity, Dirac, Orthogonal, Zero, One, Normal, TruncatedNormal, Uniform),
        *(XavierUniform, XavierNormal, HeUniform, HeNormal),
    )
    for word in (kind.__name__.lower(), re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower())
}
"""MindSpore's words for the initializers, in lower case."""


def initializer(init: Any, shape: Sequence[int] | int | None = None, dtype: Any = torch.float32) -> Tensor:
    """Return a new tensor, filled.

    Args:
        init: a word of `NAMES`, an Initializer, a number, or a tensor of this shape, which is copied.

    Raises:
        UsageError: an unknown word, or a shape that does not fit.
    """
    if isinstance(init, Tensor) and shape is None:
        shape = init.shape
    if shape is None:
        raise UsageError(f"initializer({init!r}): give a shape")
    sizes = [shape] if isinstance(shape, int) else list(shape)
    return fill(torch.empty(sizes, dtype=dtype), init)


@torch.no_grad()
def fill(tensor: Tensor, init: Any) -> Tensor:
    """Fill a tensor in place as `initializer` does, and return it."""
    if isinstance(init, str):
        if init.lower() not in NAMES:
            raise UsageError(f"initializer {init!r}: unknown{near_miss(init, NAMES)}; known are {', '.join(NAMES)}")
        init = NAMES[init.lower()]()
    if isinstance(init, Initializer):
        return init(tensor)
    if isinstance(init, int | float):
        return nn.init.constant_(tensor, init)
    value = torch.as_tensor(init)
    if value.shape != tensor.shape:
        raise UsageError(f"initial value of shape {tuple(value.shape)} for a weight of shape {tuple(tensor.shape)}")
    return tensor.copy_(value)


def begin(layer: Any, weight_init: Any, bias_init: Any) -> None:
    """Fill the weights of a layer; None leaves them as they are, as does a layer without them."""
    if weight_init is not None and layer.weight is not None:
        fill(layer.weight, weight_init)
    if bias_init is not None and layer.bias is not None:
        fill(layer.bias, bias_init)


_seed: int | None = None


def set_seed(seed: int) -> None:
    """Seed torch, numpy, Python and data sets. Every rank gives the same seed.

    Raises:
        UsageError: no whole number of 0 or more, below 2**32.
    """
    global _seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UsageError(f"set_seed({seed!r}): a whole number, 0 or more, below 2**32")
    _seed = seed
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    config.set_seed(seed)


def get_seed() -> int | None:
    """Return the seed that was set last; None before."""
    return _seed
