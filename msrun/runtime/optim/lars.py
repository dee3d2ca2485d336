"""LARS: an optimizer whose gradients are scaled to the norms of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from msrun.errors import StrategyError
from msrun.runtime.nn.replaced import follow
from msrun.runtime.optim.base import check_gradients, check_number
from msrun.runtime.parts.on_servers import refuse_on_servers
from msrun.runtime.parts.part_functions import norms_of_each


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
        follow(self.optimizer)
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
        follow(self.optimizer)
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
