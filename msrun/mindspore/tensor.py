"""Tensor and Parameter under MindSpore's names: they make torch's, and what they make is torch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from msrun.runtime.parallel.late_loss import LateLoss
from msrun.runtime.parallel.modes.hybrid import layerwise_parallel as mark_layerwise


class _MakesTensors(type):
    def __call__(cls, input_data: Any = None, dtype: Any = None, shape: Any = None, init: Any = None) -> torch.Tensor:
        if init is not None:
            from msrun.mindspore.initializer import initializer

            return initializer(init, shape, dtype or torch.float32)
        if isinstance(input_data, torch.Tensor):
            return input_data.detach().clone().to(dtype)
        return torch.tensor(input_data, dtype=dtype)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor)


class Tensor(metaclass=_MakesTensors):
    """`Tensor(data, dtype)` is a torch tensor with a copy of the data; `isinstance(x, Tensor)` holds for any.

    Args:
        input_data: numbers, a numpy array or a tensor.
        dtype: of the elements; None as torch.tensor takes it.
        shape: with `init`: of a new tensor.
        init: how a new tensor is filled, see `initializer`.
    """


class _MakesParameters(type):
    def __call__(
        cls,
        default_input: Any,
        name: str | None = None,
        requires_grad: bool = True,
        layerwise_parallel: bool = False,
    ) -> nn.Parameter:
        value: torch.Tensor = default_input if isinstance(default_input, torch.Tensor) else torch.tensor(default_input)
        parameter = nn.Parameter(value.detach(), requires_grad and value.is_floating_point())
        if name is not None:
            vars(parameter)["param_name"] = name  # names in a network are torch's: the path of the attribute
        return mark_layerwise(parameter) if layerwise_parallel else parameter

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, nn.Parameter)


class Parameter(metaclass=_MakesParameters):
    """`Parameter(tensor, name, requires_grad, layerwise_parallel)` is a torch parameter.

    Args:
        layerwise_parallel: a part of a weight that belongs to this rank alone, for hybrid_parallel.
    """


def ParameterTuple(parameters: Iterable[nn.Parameter]) -> tuple[nn.Parameter, ...]:  # noqa: N802 - MindSpore's name
    """Return parameters as a tuple."""
    return tuple(parameters)


class Printed(torch.Tensor):
    """A result that prints as its numbers: `print("%s" % loss)` shows 2.3024087, as MindSpore does.

    What is computed with it is a plain tensor again.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return str(self.asnumpy())

    def __str__(self) -> str:
        return str(self.asnumpy())

    def __format__(self, how: str) -> str:
        return format(self.item() if self.dim() == 0 and how else self.asnumpy(), how)

    def asnumpy(self) -> np.ndarray:
        """Return the numbers as a numpy array."""
        array: np.ndarray = self.detach().as_subclass(torch.Tensor).cpu().numpy()
        return array


def as_results(value: Any) -> Any:
    """Return what a network has returned, its tensors as `Printed`."""
    return pytree.tree_map_only(torch.Tensor, _as_result, value)


def _as_result(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.become(Printed) if isinstance(tensor, LateLoss) else tensor.as_subclass(Printed)
