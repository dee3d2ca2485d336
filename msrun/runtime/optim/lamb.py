"""Lamb: Adam whose step of each parameter is scaled by the parameter's norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msrun.runtime.optim.base import Optimizer, adam_settings, check_number
from msrun.runtime.parts.part_functions import norms_of_each


class Lamb(Optimizer):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", 2019, algorithm 2).

        r = m' / (sqrt(v') + eps) + decay w;  w = w - lr norm(w) / norm(r) r

    m' and v' are Adam's corrected moments; norms are those of the whole parameter, also where ranks hold parts of it.
    The ratio is 1 where one of the norms is 0.

    Args:
        max_ratio: the ratio is at most this.
        target: where it works, "device" or "cpu"; see `Optimizer`.

    Raises:
        StrategyError: a value out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        max_ratio: float = 10.0,
        target: str = "device",
    ) -> None:
        check_number("Lamb", "max_ratio", max_ratio, least=0.0)
        defaults = adam_settings("Lamb", lr, betas, eps, weight_decay)
        super().__init__(params, {**defaults, "max_ratio": max_ratio}, target=target)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once with the gradients in `.grad`. All ranks call it together."""
        loss = self.run_closure(closure)
        for group in self.param_groups:
            owners: list[Tensor] = group["params"]
            updates = [None if p.grad is None else self._propose(p, p.grad, group) for p in owners]
            weights = [None if update is None else p for p, update in zip(owners, updates, strict=True)]
            norms = norms_of_each([*owners, *owners], [*weights, *updates])
            for parameter, update, of_weight, of_update in zip(
                owners, updates, norms[: len(owners)], norms[len(owners) :], strict=True
            ):
                if update is not None:
                    ratio = torch.where((of_weight > 0) & (of_update > 0), of_weight / of_update, 1.0)
                    ratio = ratio.clamp(max=group["max_ratio"]).to(update)  # which may be on the host
                    parameter.sub_(update * ratio, alpha=group["lr"])
        return loss

    def _propose(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return Adam's update, with decay."""
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        one, two = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        below = (state["exp_avg_sq"] / (1 - two ** state["step"])).sqrt().add_(group["eps"])
        update: Tensor = (state["exp_avg"] / (1 - one ** state["step"])).div_(below)
        return update.add_(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else update
