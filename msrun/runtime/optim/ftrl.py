"""FTRL: follow the regularised leader, which makes sparse weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msrun.runtime.nn.mapped_tensors import state_like
from msrun.runtime.optim.base import PerParameter, check_number


class FTRL(PerParameter):
    """FTRL-Proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013), as MindSpore has it.

        n' = n + g g;  z = z + g - (n'^-p - n^-p) / lr w
        w = 0 where abs(z) <= l1, else (sign(z) l1 - z) / (n'^-p / lr + 2 l2)

    p is lr_power. Of a sparse gradient, as `nn.Embedding(sparse=True)` has, its rows alone change.

    Args:
        initial_accum: n at the beginning.
        lr_power: 0 keeps the rate as it is.
        use_locking: MindSpore's word; a rank updates its rows alone, so that there is nothing to lock.
        weight_decay: g + decay w in place of g; of a sparse gradient in its rows.
        target: where it works, "device" or "cpu"; see `Optimizer`.

    Raises:
        StrategyError: a value out of its range.
    """

    def __init__(
        self,
        params: Any,
        initial_accum: float = 0.1,
        lr: float = 1e-3,
        lr_power: float = -0.5,
        l1: float = 0.0,
        l2: float = 0.0,
        use_locking: bool = False,
        weight_decay: float = 0.0,
        *,
        target: str = "device",
    ) -> None:
        del use_locking
        for name, value in (("initial_accum", initial_accum), ("lr", lr), ("l1", l1), ("l2", l2)):
            check_number("FTRL", name, value, least=0.0)
        check_number("FTRL", "-lr_power", -lr_power, least=0.0)
        check_number("FTRL", "weight_decay", weight_decay, least=0.0)
        defaults = {"lr": lr, "lr_power": lr_power, "l1": l1, "l2": l2, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "initial_accum": initial_accum}, target=target)

    def make_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the accumulator and the linear term."""
        return {
            "accum": state_like(parameter, "accum", group["initial_accum"]),
            "linear": state_like(parameter, "linear", 0.0),
        }

    def change(self, weight: Tensor, gradient: Tensor, tables: dict[str, Tensor], state: Any, group: Any) -> None:
        """Change weights, accumulator and linear term in place."""
        del state
        accum, linear = tables["accum"], tables["linear"]
        lr, power = group["lr"], -group["lr_power"]
        before = accum.pow(power)
        accum.addcmul_(gradient, gradient)
        after = accum.pow(power)
        linear.add_(gradient).sub_((after - before) / lr * weight)
        target = (linear.sign() * group["l1"] - linear) / (after / lr + 2 * group["l2"])
        weight.copy_(torch.where(linear.abs() > group["l1"], target, torch.zeros_like(target)))
