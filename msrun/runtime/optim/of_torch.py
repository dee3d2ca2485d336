"""torch's optimizers, which can also be called with gradients, and MindSpore's Momentum, which is one of them."""

from __future__ import annotations

from typing import Any

import torch

from msrun.errors import StrategyError
from msrun.runtime.optim.base import Optimizer


class SGD(Optimizer, torch.optim.SGD):
    """torch.optim.SGD that also takes gradients."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.0, **settings: Any) -> None:
        super().__init__(params, lr=lr, momentum=momentum, **settings)


class Momentum(Optimizer, torch.optim.SGD):
    """MindSpore's Momentum: v = m v + g, w = w - lr v; torch.optim.SGD with momentum and no dampening."""

    def __init__(self, params: Any, learning_rate: float, momentum: float, **settings: Any) -> None:
        super().__init__(params, lr=learning_rate, momentum=momentum, **settings)


class Adam(Optimizer, torch.optim.Adam):
    """torch.optim.Adam that also takes gradients, and on demand has epsilon where MindSpore has it.

        torch:         w = w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)
        use_eps_hat:   w = w - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps)

    The second is the one that Kingma and Ba ("Adam: A Method for Stochastic Optimization", 2015, end of section 2) name
    the more efficient, with "epsilon hat"; MindSpore and TensorFlow have it. It is torch's formula with an epsilon of
    eps / sqrt(1 - b2^t), 32 times eps in the first step and eps after some thousand, and torch's kernels compute it.

    Raises:
        StrategyError: with use_eps_hat parameters of one group that have taken different numbers of steps.
    """

    def __init__(self, params: Any, *args: Any, use_eps_hat: bool = False, **settings: Any) -> None:
        super().__init__(params, *args, **settings)
        if use_eps_hat:
            self.defaults["eps_hat"] = self.defaults["eps"]
            for group in self.param_groups:
                group["eps_hat"] = group["eps"]

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:  # torch calls it before it reads `eps`
        found = super()._init_group(group, *lists)
        eps, steps = group.get("eps_hat"), {int(step) for step in lists[-1]}
        if eps is not None and steps:
            if len(steps) > 1:
                raise StrategyError(
                    f"Adam(use_eps_hat=True): parameters of one group have taken {min(steps)} to {max(steps)} steps: "
                    "give those that have no gradient in some steps a group of their own"
                )
            group["eps"] = eps / (1 - group["betas"][1] ** (steps.pop() + 1)) ** 0.5
        return found


class AdamW(Optimizer, torch.optim.AdamW):
    """torch.optim.AdamW that also takes gradients."""
