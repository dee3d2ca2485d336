"""Optimizer: the base of optimizers that can also be called with gradients, as MindSpore's are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.errors import StrategyError
from msrun.runtime.nn.replaced import follow
from msrun.runtime.optim.host_steps import find_offload, offload
from msrun.runtime.optim.memory import OptimizerMemory, memory_of
from msrun.runtime.tensors.plain_tensors import local_part

TARGETS = ("cpu", "device")


class Optimizer(torch.optim.Optimizer):
    """Base of optimizers that can be called: `optimizer(gradients)` gives every parameter its gradient and steps.

    Write your own as with torch's base: `super().__init__(params, defaults)` and `step()`, which reads `.grad`.

    Args:
        target: where the optimizer works: "device", that of the weights, or "cpu", the host (`offload`). Upper case
            will do.

    Raises:
        StrategyError: another target.
    """

    def __init__(self, *args: Any, target: str = "device", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.target = target

    @property
    def target(self) -> str:
        """Where the optimizer works, "device" or "cpu"; may be set between steps, its state moves along."""
        return TARGETS[find_offload(self) is None]

    @target.setter
    def target(self, target: str) -> None:
        word = target.lower() if isinstance(target, str) else target
        if word not in TARGETS:
            raise StrategyError(f"{type(self).__name__}(target={target!r}): must be {' or '.join(TARGETS)}")
        known = find_offload(self)
        if word == "cpu" and known is None:
            offload(self)
        elif word == "device" and known is not None:
            known.bring_back(self)

    def memory(self) -> OptimizerMemory:
        """Return what the training of the parameters holds on this rank, and what its steps copy; `print` it."""
        return memory_of(self)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Step once with these gradients, one per parameter in the order given to the constructor.

        Raises:
            StrategyError: another number of gradients, or one of another shape than its parameter.
        """
        follow(self)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, gradient in zip(parameters, check_gradients(parameters, gradients), strict=True):
            parameter.grad = gradient
        self.step()
        for parameter in parameters:
            parameter.grad = None

    def run_closure(self, closure: Callable[[], Any] | None) -> Any:
        """Return what the closure of a step computes, with gradients switched on; None without one."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


def check_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of an optimizer that is called.

    Raises:
        StrategyError: another number of gradients, or one of another shape than its parameter.
    """
    gradients = list(gradients)
    if len(gradients) != len(parameters):
        raise StrategyError(
            f"optimizer: {len(gradients)} gradients for {len(parameters)} parameters; give one for each, in order"
        )
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if local_part(gradient).shape != local_part(parameter).shape:
            raise StrategyError(
                f"optimizer: gradient {index} has shape {tuple(gradient.shape)} but its parameter "
                f"{tuple(parameter.shape)}; give the gradients that value_and_grad returned"
            )
    return gradients
