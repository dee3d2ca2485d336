"""torch's random operators as pure functions: the value of an element follows from (seed, step, call, place).

Each operator is known by its ATen overload. `draw` gives what the overload would return, or write; the distributions
are those of torch's documentation, the numbers are those of `nn.random_bits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from msrun.runtime.nn.random_stream import DIGITS, Source, keep_mask

aten = torch.ops.aten

Arguments = Mapping[str, Any]
"""Arguments of an overload by their names in its schema, all of them."""
_Draw = Callable[[Source, Arguments, torch.dtype], Tensor]


def _computed(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a type are computed."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _uniform(source: Source, given: Arguments, dtype: torch.dtype) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    value = source.uniform(dtype)
    return value if (low, high) == (0, 1) else value.mul_(high - low).add_(low)


def _normal(source: Source, given: Arguments, dtype: torch.dtype) -> Tensor:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    if not isinstance(std, Tensor) and std < 0:
        raise ValueError(f"normal expects std >= 0.0, but found std {std}")
    result = source.normal(_computed(dtype))
    if isinstance(std, Tensor) or std != 1:
        result = result * std
    if isinstance(mean, Tensor) or mean != 0:
        result = result + mean
    return result.to(dtype)


def _log_normal(source: Source, given: Arguments, dtype: torch.dtype) -> Tensor:
    return _normal(source, given, _computed(dtype)).exp_().to(dtype)


def _exponential(source: Source, given: Arguments, dtype: torch.dtype) -> Tensor:
    """-log(u) / lambda; never 0, so that its logarithm is a number."""
    value = source.above_zero(_computed(dtype)).log_().neg_().clamp_min_(torch.finfo(dtype).eps / 2)
    return value.div_(given["lambd"]).to(dtype)


def _cauchy(source: Source, given: Arguments, dtype: torch.dtype) -> Tensor:
    value = source.above_zero(_computed(dtype)).sub_(0.5).mul_(math.pi).tan_()
    return value.mul_(given["sigma"]).add_(given["median"]).to(dtype)


def _geometric(source: Source, given: Arguments, dtype: torch.dtype) -> Tensor:
    p = given["p"]
    if not 0 < p <= 1:
        raise ValueError(f"geometric_ expects p to be in (0, 1], but got p={p}")
    trials = source.above_zero(torch.float64).log_().div_(math.log1p(-p) if p < 1 else -math.inf)
    return trials.ceil_().clamp_min_(1).to(dtype)


def _bernoulli(source: Source, given: Arguments, dtype: torch.dtype) -> Tensor:
    p = given["p"] if "p" in given else given["self"]
    if not isinstance(p, Tensor):
        _check_probability(0 <= p <= 1, p)
        kept = keep_mask(source.key, source.call, 1 - p, source.box, source.batch_dim, source.device)
        return kept.to(dtype)
    if not isinstance(p, FakeTensor) and p.device.type == "cpu":
        _check_probability(bool(((p >= 0) & (p <= 1)).all()), "other values")
    return (source.uniform(torch.float64) < p).to(dtype)


def _check_probability(is_right: bool, found: Any) -> None:
    if not is_right:
        raise ValueError(f"bernoulli expects p to be in [0, 1], but got {found}")


def _integers(source: Source, given: Arguments, dtype: torch.dtype) -> Tensor:
    return source.integers(given.get("low", 0), given["high"]).to(dtype)


def _random(source: Source, given: Arguments, dtype: torch.dtype) -> Tensor:
    low, high = given.get("from", 0), given.get("to")
    if high is None:
        if dtype == torch.bool:
            high = 2
        else:
            high = (1 << DIGITS[dtype] if dtype.is_floating_point else torch.iinfo(dtype).max) + 1
    return source.integers(low, high).to(dtype)


def _leaky(source: Source, given: Arguments, dtype: torch.dtype) -> Tensor:
    """Slopes of rrelu in training: 1 above 0."""
    low, high = given["lower"], given["upper"]
    slope = source.uniform(_computed(dtype)).mul_(high - low).add_(low).to(dtype)
    return slope.masked_fill_(given["self"] > 0, 1)


def _kept(source: Source, given: Arguments, dtype: torch.dtype) -> Tensor:
    """Mask of a dropout."""
    del dtype
    return keep_mask(source.key, source.call, given["p"], source.box, source.batch_dim, source.device)


_LIKE = ("default", "generator")
_BY_NAME: dict[str, tuple[_Draw, Sequence[str]]] = {
    "rand": (_uniform, _LIKE),
    "rand_like": (_uniform, _LIKE),
    "uniform": (_uniform, ["default"]),
    "uniform_": (_uniform, ["default"]),
    "randn": (_normal, _LIKE),
    "randn_like": (_normal, _LIKE),
    "normal": (_normal, ["Tensor_Tensor", "Tensor_float", "float_Tensor", "float_float"]),
    "normal_": (_normal, ["default"]),
    "normal_functional": (_normal, ["default"]),
    "log_normal": (_log_normal, ["default"]),
    "log_normal_": (_log_normal, ["default"]),
    "exponential": (_exponential, ["default"]),
    "exponential_": (_exponential, ["default"]),
    "cauchy": (_cauchy, ["default"]),
    "cauchy_": (_cauchy, ["default"]),
    "geometric": (_geometric, ["default"]),
    "geometric_": (_geometric, ["default"]),
    "bernoulli": (_bernoulli, ["default", "p", "Tensor"]),
    "bernoulli_": (_bernoulli, ["float", "Tensor"]),
    "randint": (_integers, ["default", "generator", "low", "low_generator"]),
    "randint_like": (_integers, ["default", "generator", "low_dtype", "low_generator_dtype"]),
    "random": (_random, ["default", "from", "to"]),
    "random_": (_random, ["default", "from", "to"]),
    "rrelu": (_leaky, ["default"]),
    "rrelu_with_noise": (_leaky, ["default"]),
    "rrelu_with_noise_": (_leaky, ["default"]),
    "native_dropout": (_kept, ["default"]),
}
DRAWS: dict[torch._ops.OpOverload, _Draw] = {
    getattr(getattr(aten, name), overload): function
    for name, (function, overloads) in _BY_NAME.items()
    for overload in overloads
    if hasattr(aten, name) and overload in getattr(aten, name).overloads()
}
"""Random operators whose numbers are ours. Those that write have their names with `_`."""
FACTORIES = frozenset(
    operator for operator in DRAWS if not any(isinstance(a.type, torch.TensorType) for a in operator._schema.arguments)
)
"""Those that take no tensor."""


WITHOUT_VALUES = frozenset(
    operator for operator in DRAWS if str(operator).split(".")[1] in ("rand_like", "randn_like", "randint_like")
)
"""Those that take shape, type and device of a tensor, and no gradient."""


def is_drawn(operator: Any, given: Arguments) -> bool:
    """Return whether a call draws numbers that are ours to give: not from a generator of the user's."""
    if operator not in DRAWS or given.get("generator") is not None:
        return False
    return bool(given.get("training", True)) and given.get("train", True) is not False


def arguments_of(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the schema, defaults included."""
    found = {}
    for index, argument in enumerate(operator._schema.arguments):
        if index < len(args):
            found[argument.name] = args[index]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def dtype_of(operator: torch._ops.OpOverload, given: Arguments) -> torch.dtype:
    """Return the type of what an operator draws."""
    dtype = given.get("dtype")
    if isinstance(dtype, torch.dtype):
        return dtype
    if operator in FACTORIES:
        return torch.get_default_dtype() if dtype is None else torch.int64  # which the schema of randint writes as 4
    tensors = [value for name in ("self", "input", "mean", "std") if isinstance(value := given.get(name), Tensor)]
    return tensors[0].dtype if len(tensors) == 1 else torch.promote_types(tensors[0].dtype, tensors[1].dtype)


@torch.no_grad()
def draw(operator: torch._ops.OpOverload, given: Arguments, source: Source) -> Tensor:
    """Return what an operator draws for the source's box; of rrelu the slopes, of dropout the mask."""
    return DRAWS[operator](source, given, dtype_of(operator, given))


def shape_of(operator: torch._ops.OpOverload, given: Arguments) -> tuple[tuple[int, ...], torch.device]:
    """Return shape and device of what an operator draws."""
    if operator in FACTORIES:
        device = given.get("device")
        return tuple(given["size"]), torch.device("cpu" if device is None else device)
    tensors = [value for name in ("self", "input", "mean", "std") if isinstance(value := given.get(name), Tensor)]
    device = given.get("device")
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return tuple(shape), tensors[0].device if device is None else torch.device(device)


def drawn_result(operator: torch._ops.OpOverload, given: Arguments, values: Tensor) -> Any:
    """Return what an operator returns, and write what it writes, of what it has drawn."""
    name = str(operator).split(".")[1]
    if name == "native_dropout":
        p = given["p"]
        return given["input"] * values * (1.0 / (1.0 - p) if p < 1 else 0.0), values
    subject: Any = given.get("self")
    if name.startswith("rrelu"):
        if "noise" in given:
            given["noise"].copy_(values)
        values = subject * values
    if operator._schema.is_mutable and name.endswith("_"):
        return subject.copy_(values)
    return laid_out(values, subject, given.get("memory_format"))


def laid_out(values: Tensor, like: Any, memory_format: torch.memory_format | None) -> Tensor:
    """Return values in the order in memory that torch's operator would give them."""
    if not isinstance(like, Tensor) or memory_format == torch.contiguous_format or like.shape != values.shape:
        return values
    keeps = memory_format in (None, torch.preserve_format)
    if keeps and like.is_contiguous():
        return values
    wanted = torch.preserve_format if keeps else memory_format
    return torch.empty_like(like, dtype=values.dtype, device=values.device, memory_format=wanted).copy_(values)
