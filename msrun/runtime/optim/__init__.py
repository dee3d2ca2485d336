"""Optimizers: torch's, which can also be called with gradients as MindSpore's are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.errors import StrategyError
from msrun.runtime.nn.replaced import follow

__all__ = ["SGD", "Adam", "AdamW", "Momentum"]


class _TakesGradients:
    """`optimizer(gradients)` gives every parameter its gradient and steps; `optimizer.step()` works as in torch."""

    param_groups: list[dict[str, Any]]

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Step once with these gradients, one per parameter in the order given to the constructor.

        Raises:
            StrategyError: another number of gradients, or one of another shape than its parameter.
        """
        follow(self)  # type: ignore[arg-type]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = list(gradients)
        if len(gradients) != len(parameters):
            raise StrategyError(
                f"optimizer: {len(gradients)} gradients for {len(parameters)} parameters; give one for each, in order"
            )
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if gradient.shape != parameter.shape:
                raise StrategyError(
                    f"optimizer: gradient {index} has shape {tuple(gradient.shape)} but its parameter "
                    f"{tuple(parameter.shape)}; give the gradients that value_and_grad returned"
                )
            parameter.grad = gradient
        self.step()  # type: ignore[attr-defined]
        for parameter in parameters:
            parameter.grad = None


class SGD(_TakesGradients, torch.optim.SGD):
    """torch.optim.SGD that also takes gradients."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.0, **settings: Any) -> None:
        super().__init__(params, lr=lr, momentum=momentum, **settings)


class Momentum(_TakesGradients, torch.optim.SGD):
    """MindSpore's Momentum: v = m v + g, w = w - lr v; torch.optim.SGD with momentum and no dampening."""

    def __init__(self, params: Any, learning_rate: float, momentum: float, **settings: Any) -> None:
        super().__init__(params, lr=learning_rate, momentum=momentum, **settings)


class Adam(_TakesGradients, torch.optim.Adam):
    """torch.optim.Adam that also takes gradients."""


class AdamW(_TakesGradients, torch.optim.AdamW):
    """torch.optim.AdamW that also takes gradients."""
