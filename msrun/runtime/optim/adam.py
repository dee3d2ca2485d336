"""Adam without bias correction and with decoupled decay; Adam that touches the rows of a table that have a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msrun.runtime.nn.mapped_tensors import state_like
from msrun.runtime.optim.base import Optimizer, PerParameter, adam_settings


class AdamWeightDecay(Optimizer):
    """MindSpore's AdamWeightDecay, the optimizer of its BERT and GPT.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g g;  w = w - lr (m / (sqrt(v) + eps) + decay w)

    Unlike AdamW the moments are not corrected for their start at 0. The state is called adam_m and adam_v, in float32
    for weights of 16 bits too.

    Args:
        decay_filter: whether a parameter decays; None: all do. `lambda p: p.dim() > 1` spares biases and norms.
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
        decay_filter: Callable[[Tensor], bool] | None = None,
        target: str = "device",
    ) -> None:
        self._decay_filter = decay_filter
        super().__init__(params, adam_settings("AdamWeightDecay", lr, betas, eps, weight_decay), target=target)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once with the gradients in `.grad`."""
        loss = self.run_closure(closure)
        for group in self.param_groups:
            for decays, parameters in self._by_decay(group):
                self._update(parameters, group, group["weight_decay"] if decays else 0.0)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state; torch would narrow the moments to the type of the weights."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][key] = value.to(parameter.device, _wide(parameter), copy=True)

    def _by_decay(self, group: dict[str, Any]) -> list[tuple[bool, list[Tensor]]]:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if self._decay_filter is None or not group["weight_decay"]:
            return [(True, parameters)] if parameters else []
        found = [(decays, [p for p in parameters if bool(self._decay_filter(p)) == decays]) for decays in (True, False)]
        return [(decays, some) for decays, some in found if some]

    def _update(self, parameters: list[Tensor], group: dict[str, Any], decay: float) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                for key in ("adam_m", "adam_v"):
                    self.state[parameter][key] = torch.zeros_like(parameter, dtype=_wide(parameter))
        first, second = ([self.state[p][key] for p in parameters] for key in ("adam_m", "adam_v"))
        gradients = [p.grad.to(m.dtype) for p, m in zip(parameters, first, strict=True)]  # type: ignore[union-attr]
        one, two = group["betas"]
        torch._foreach_lerp_(first, gradients, 1 - one)
        torch._foreach_mul_(second, two)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - two)
        below = torch._foreach_sqrt(second)
        torch._foreach_add_(below, group["eps"])
        updates = list(torch._foreach_div(first, below))
        if decay:
            wide = [p.to(m.dtype) for p, m in zip(parameters, first, strict=True)]
            torch._foreach_add_(updates, wide, alpha=decay)
        updates = [update.to(p.dtype) for update, p in zip(updates, parameters, strict=True)]
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


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
