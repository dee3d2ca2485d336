"""Tensor and Parameter under MindSpore's names: they make torch's, and what they make is torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from msrun.errors import UsageError
from msrun.mindspore.dtype import as_dtype
from msrun.mindspore.initializer import fill, initializer
from msrun.mindspore.tensor_methods import text_of
from msrun.runtime.parallel.border import LateLoss
from msrun.runtime.parallel.modes.own_gradients import layerwise_parallel as mark_layerwise

DEFAULT_NAME = "Parameter"


class _Poses(type):
    """A class that makes objects of torch's class, which are its instances; it has torch's methods."""

    torchs: type
    make: Callable[..., Any]

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        return cls.make(*args, **settings)

    @property
    def __signature__(cls) -> inspect.Signature:
        return inspect.signature(cls.make)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.torchs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.torchs, name)


def tensor(
    input_data: Any = None, dtype: Any = None, shape: Any = None, init: Any = None, const_arg: bool = False
) -> torch.Tensor:
    """Return a new tensor, see `Tensor`."""
    kind = None if dtype is None else as_dtype(dtype)
    if init is not None:
        return initializer(init, shape, kind or torch.float32)
    if isinstance(input_data, torch.Tensor):
        return input_data.detach().clone().to(kind)
    if input_data is None and shape is not None:
        sizes = [shape] if isinstance(shape, int) else [size if isinstance(size, int) else 1 for size in shape]
        return torch.zeros(sizes, dtype=kind)
    return torch.tensor(input_data, dtype=kind)


class Tensor(metaclass=_Poses):
    """`Tensor(data, dtype)` is a torch tensor with a copy of the data; `isinstance(x, Tensor)` holds for any.

    Args:
        input_data: numbers, a numpy array or a tensor.
        dtype: of the elements; None as torch.tensor takes it.
        shape: with `init`: of a new tensor. Without: of zeros, a size that is a Symbol or None being 1.
        init: how a new tensor is filled, see `initializer`.
    """

    torchs, make = torch.Tensor, staticmethod(tensor)

    @staticmethod
    def from_numpy(array: np.ndarray) -> torch.Tensor:
        """Return a tensor on the memory of an array."""
        return torch.from_numpy(array)


class Symbol:
    """A size that is not known before the first batch, for `Tensor(shape=[Symbol(divisor=8), 3])` and set_inputs."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings


def _make_parameter(
    default_input: Any,
    name: str | None = None,
    requires_grad: bool = True,
    layerwise_parallel: bool = False,
    parallel_optimizer: bool = True,
    storage_format: str = "",
    device: str | None = None,
) -> nn.Parameter:
    if storage_format or device is not None:
        raise UsageError(f"Parameter(storage_format={storage_format!r}, device={device!r}): leave both out")
    value: torch.Tensor = default_input if isinstance(default_input, torch.Tensor) else tensor(default_input)
    parameter = nn.Parameter(value.detach().clone(), requires_grad and value.is_floating_point())
    if name is not None:
        vars(parameter)["param_name"] = name
    if not parallel_optimizer:
        vars(parameter)["parallel_optimizer"] = False
    return mark_layerwise(parameter) if layerwise_parallel else parameter


class Parameter(metaclass=_Poses):
    """`Parameter(tensor, name, requires_grad, layerwise_parallel)` is a torch parameter.

    Args:
        layerwise_parallel: a part of a weight that belongs to this rank alone, for hybrid_parallel.
        parallel_optimizer: False: optimizer parallel leaves it whole.
    """

    torchs, make = nn.Parameter, staticmethod(_make_parameter)


class ParameterTuple(tuple):
    """Parameters, as a tuple."""

    __slots__ = ()

    def clone(self, prefix: str = "", init: Any = "same") -> ParameterTuple:
        """Return new parameters, filled as `init` says ("same": with these values), named behind a prefix."""
        copies = [clone_parameter(one, init) for one in self]
        for one, copy in zip(self, copies, strict=True):
            vars(copy)["param_name"] = f"{prefix}.{name_of(one)}" if prefix else name_of(one)
        return ParameterTuple(copies)


def name_of(parameter: torch.Tensor) -> str:
    """Return MindSpore's name of a parameter: that of its place in the cell that it was put into last."""
    return vars(parameter).get("param_name", DEFAULT_NAME)


def _set_name(parameter: torch.Tensor, name: str) -> None:
    vars(parameter)["param_name"] = name


@torch.no_grad()
def set_data(parameter: torch.Tensor, data: Any, slice_shape: bool = False) -> torch.Tensor:
    """Give a parameter other values, of its shape unless `slice_shape`, and return it.

    Raises:
        UsageError: values of another shape.
    """
    value = data.detach() if isinstance(data, torch.Tensor) else torch.as_tensor(data)
    if value.shape == parameter.shape and value.dtype == parameter.dtype:
        return parameter.copy_(value)
    if value.shape != parameter.shape and not slice_shape:
        raise UsageError(
            f"set_data: shape {tuple(value.shape)} for parameter {name_of(parameter)} of {tuple(parameter.shape)}"
        )
    parameter.data = value.to(parameter.device, parameter.dtype, copy=True)
    return parameter


def clone_parameter(parameter: torch.Tensor, init: Any = "same") -> nn.Parameter:
    """Return a new parameter of the same name, filled as `init` says ("same": with these values)."""
    value = parameter.detach().clone()
    if not (isinstance(init, str) and init == "same"):
        fill(value, init)
    copy = nn.Parameter(value, parameter.requires_grad)
    vars(copy)["param_name"] = name_of(parameter)
    return copy


def _clone(parameter: Any, *args: Any, **settings: Any) -> torch.Tensor:
    """`parameter.clone(init)` as MindSpore's; `clone()` and `clone(memory_format=...)` as torch's."""
    if "memory_format" in settings or (settings.keys() | set(args)) == set():
        copy = torch.Tensor.clone(parameter, **settings)
        vars(copy)["param_name"] = name_of(parameter)
        return copy
    return clone_parameter(parameter, *args, **settings)


def _set_dtype(parameter: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Change the type of the elements, and return the parameter, or what `clone` made of one."""
    if not parameter.is_leaf:
        parameter.detach_()
    parameter.data = parameter.data.to(as_dtype(dtype))
    return parameter


def add_parameter_methods() -> None:
    """Give torch's parameters MindSpore's methods; names that torch has keep torch's meaning."""
    words: dict[str, Any] = {"parallel_optimizer": True, "layerwise_parallel": False, "sliced": False, "is_init": True}
    words |= {"name": property(name_of, _set_name), "clone": _clone, "inited_param": None, "comm_fusion": None}
    for name, word in {**words, "init": property(lambda self: self.detach().clone())}.items():
        setattr(nn.Parameter, name, word)
    torch.Tensor.name = property(lambda self: vars(self).get("param_name"), _set_name)  # type: ignore[attr-defined]
    torch.Tensor.set_data = set_data  # type: ignore[attr-defined]
    torch.Tensor.set_dtype = _set_dtype  # type: ignore[attr-defined]


class Printed(torch.Tensor):
    """A result that prints as its numbers: `print("%s" % loss)` shows 2.3024087, as MindSpore does.

    What is computed with it is a plain tensor again.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return text_of(self)

    __str__ = __repr__


def as_results(value: Any) -> Any:
    """Return what a network has returned, its tensors as `Printed`."""
    return pytree.tree_map_only(torch.Tensor, _as_result, value)


def _as_result(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.become(Printed) if isinstance(tensor, LateLoss) else tensor.as_subclass(Printed)


__all__ = ["Parameter", "ParameterTuple", "Symbol", "Tensor", "tensor"]
