"""How weights begin: MindSpore's initializers over torch.nn.init."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import UsageError, near_miss


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


class Constant(Initializer):
    """Every element is `value`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.constant_(tensor, self.value)


class Zero(Constant):
    """Every element is 0."""

    def __init__(self) -> None:
        super().__init__(0.0)


class One(Constant):
    """Every element is 1."""

    def __init__(self) -> None:
        super().__init__(1.0)


class Normal(Initializer):
    """Normal distribution; MindSpore's default deviation is 0.01."""

    def __init__(self, sigma: float = 0.01, mean: float = 0.0) -> None:
        self.sigma, self.mean = sigma, mean

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.normal_(tensor, self.mean, self.sigma)


class TruncatedNormal(Initializer):
    """Normal distribution without what is more than two deviations from the mean."""

    def __init__(self, sigma: float = 0.01, mean: float = 0.0, a: float = -2.0, b: float = 2.0) -> None:
        self.sigma, self.mean, self.a, self.b = sigma, mean, a, b

    def __call__(self, tensor: Tensor) -> Tensor:
        low, high = self.mean + self.a * self.sigma, self.mean + self.b * self.sigma
        return nn.init.trunc_normal_(tensor, self.mean, self.sigma, low, high)


class Uniform(Initializer):
    """Uniform in [-scale, scale); MindSpore's default scale is 0.07."""

    def __init__(self, scale: float = 0.07) -> None:
        self.scale = scale

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.uniform_(tensor, -self.scale, self.scale)


class XavierUniform(Initializer):
    """Uniform in +-gain * sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010)."""

    def __init__(self, gain: float = 1.0) -> None:
        self.gain = gain

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.xavier_uniform_(tensor, self.gain)


class XavierNormal(XavierUniform):
    """Normal with deviation gain * sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio, 2010)."""

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.xavier_normal_(tensor, self.gain)


class HeUniform(Initializer):
    """Uniform in +-gain * sqrt(3 / fan) (He et al., 2015)."""

    def __init__(self, negative_slope: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> None:
        self.slope, self.mode, self.nonlinearity = negative_slope, mode, nonlinearity

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.kaiming_uniform_(tensor, self.slope, self.mode, self.nonlinearity)  # type: ignore[arg-type]


class HeNormal(HeUniform):
    """Normal with deviation gain / sqrt(fan) (He et al., 2015)."""

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.kaiming_normal_(tensor, self.slope, self.mode, self.nonlinearity)  # type: ignore[arg-type]


class Identity(Initializer):
    """Ones on the diagonal."""

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.eye_(tensor)


class Dirac(Initializer):
    """A convolution's weight that returns its input."""

    def __init__(self, groups: int = 1) -> None:
        self.groups = groups

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.dirac_(tensor, self.groups)


class Orthogonal(Initializer):
    """Rows or columns at right angles."""

    def __init__(self, gain: float = 1.0) -> None:
        self.gain = gain

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.orthogonal_(tensor, self.gain)


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


NAMES: dict[str, type[Initializer]] = {
    "identity": Identity,
    "dirac": Dirac,
    "orthogonal": Orthogonal,
    "zeros": Zero,
    "zero": Zero,
    "ones": One,
    "one": One,
    "normal": Normal,
    "truncatednormal": TruncatedNormal,
    "truncated_normal": TruncatedNormal,
    "uniform": Uniform,
    "xavier_uniform": XavierUniform,
    "xavieruniform": XavierUniform,
    "xavier_normal": XavierNormal,
    "xaviernormal": XavierNormal,
    "he_uniform": HeUniform,
    "heuniform": HeUniform,
    "he_normal": HeNormal,
    "henormal": HeNormal,
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
