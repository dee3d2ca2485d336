"""LazyAdam: Adam that touches the rows of a table that have a gradient, and no others."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from msrun.runtime.nn.mapped_tensors import state_like
from msrun.runtime.optim.per_parameter import PerParameter
from msrun.runtime.optim.settings import adam_settings


class LazyAdam(PerParameter):
    """Adam; of a sparse gradient, as `nn.Embedding(sparse=True)` has, moments and weights of its rows alone change.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g g;  w = w - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps)

    t counts the steps of the parameter, not those of a row. eps stands where MindSpore has it: torch's Adam adds it to
    the corrected root, so that the two differ by eps (1 - sqrt(1 - b2^t)) below the line. It is not Adam: a row without
    a gradient stays bit for bit as it is, moments included.

    Args:
        use_locking: MindSpore's word; a rank updates its rows alone, so that there is nothing to lock.
        use_nesterov: step with b1 m + (1 - b1) g in place of m.
        weight_decay: g + decay w in place of g; of a sparse gradient in its rows.
        target: where it works, "device" or "cpu"; see `Optimizer`.

    Raises:
        StrategyError: a value out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        target: str = "device",
    ) -> None:
        del use_locking
        defaults = adam_settings("LazyAdam", lr, betas, eps, weight_decay)
        super().__init__(params, {**defaults, "use_nesterov": use_nesterov}, target=target)

    def make_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - the interface
        """Return the moments, 0, and the steps done."""
        return {"step": 0, **{key: state_like(parameter, key, 0.0) for key in ("exp_avg", "exp_avg_sq")}}

    def change(self, weight: Tensor, gradient: Tensor, tables: dict[str, Tensor], state: Any, group: Any) -> None:
        """Change weights and moments in place."""
        first, second, step = tables["exp_avg"], tables["exp_avg_sq"], state["step"]
        one, two = group["betas"]
        first.mul_(one).add_(gradient, alpha=1 - one)
        second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        rate = group["lr"] * (1 - two**step) ** 0.5 / (1 - one**step)
        ahead = first * one + gradient * (1 - one) if group["use_nesterov"] else first
        weight.sub_(ahead / second.sqrt().add_(group["eps"]), alpha=rate)
