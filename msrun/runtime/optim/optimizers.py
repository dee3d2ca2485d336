"""Optimizers: torch's, which can also be called with gradients, and those of MindSpore's that torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.errors import StrategyError
from msrun.runtime.nn.mapped_tensors import state_like
from msrun.runtime.optim.base import Optimizer, PerParameter, adam_settings, check_gradients, check_number
from msrun.runtime.parts.norms import norms_of_each
from msrun.runtime.parts.on_servers import refuse_on_servers


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


class LARS:
    """Scale gradients before another optimizer's step (You et al., "Large Batch Training of Convolutional Networks").

        rate = coefficient norm(w) / (norm(g) + decay norm(w) + epsilon);  g = rate (g + decay w)

    decay is the other optimizer's weight_decay, which takes no other part; norms are those of the whole parameter, also
    where ranks hold parts of it. Where one of them is 0 the rate is 1.

    Args:
        optimizer: such as SGD or Momentum; its learning rate and schedulers keep their meaning.
        use_clip: rate / lr is at most 1, so that a parameter never moves faster than without LARS.
        lars_filter: which parameters are scaled; None: those with two dimensions or more, which spares biases and
            normalisation.

    Raises:
        StrategyError: not an optimizer, or a value out of its range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        epsilon: float = 1e-5,
        coefficient: float = 0.001,
        use_clip: bool = False,
        lars_filter: Callable[[Tensor], bool] | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise StrategyError(f"LARS({type(optimizer).__name__}): give an optimizer")
        check_number("LARS", "epsilon", epsilon, least=0.0)
        check_number("LARS", "coefficient", coefficient, least=0.0)
        self.optimizer = optimizer
        self._epsilon, self._coefficient, self._use_clip = epsilon, coefficient, use_clip
        self._filter = lars_filter or (lambda parameter: parameter.dim() > 1)

    @torch.no_grad()
    def step(self) -> None:
        """Scale the gradients in `.grad`, then step. All ranks call it together."""
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            self._scale(group["params"], decay, group["lr"])
            if decay:
                group["weight_decay"] = 0.0
        try:
            self.optimizer.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if decay:
                    group["weight_decay"] = decay

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Give every parameter its gradient, and step."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, gradient in zip(parameters, check_gradients(parameters, gradients), strict=True):
            parameter.grad = gradient
        self.step()
        self.zero_grad()

    def _scale(self, owners: Sequence[Tensor], decay: float, lr: float) -> None:
        refuse_on_servers(owners, "LARS")
        scaled = [parameter for parameter in owners if self._filter(parameter)]
        gradients = [parameter.grad for parameter in scaled]
        weights = [None if parameter.grad is None else parameter for parameter in scaled]
        norms = norms_of_each([*scaled, *scaled], [*weights, *gradients])
        rates: dict[Tensor, Tensor] = {}
        for parameter, of_weight, of_gradient in zip(scaled, norms[: len(scaled)], norms[len(scaled) :], strict=True):
            rate = self._coefficient * of_weight / (of_gradient + decay * of_weight + self._epsilon)
            if self._use_clip:
                rate = (rate / lr).clamp(max=1.0)
            rates[parameter] = torch.where((of_weight > 0) & (of_gradient > 0), rate, 1.0)
        for parameter in owners:
            gradient = parameter.grad
            if gradient is None:
                continue
            if decay:
                gradient = gradient.add(parameter, alpha=decay)
            parameter.grad = gradient * rates[parameter].to(gradient.dtype) if parameter in rates else gradient

    # What training loops, schedulers and checkpoints ask of an optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the other optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of the other optimizer."""
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the other optimizer; LARS has none of its own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the other optimizer a saved state."""
        self.optimizer.load_state_dict(state)
