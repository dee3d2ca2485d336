"""An optimizer that steps during the backward pass: each message of gradients is used and dropped when it arrives.

torch does the same with a post-accumulate hook and an optimizer for each parameter ("optimizer step in backward"). Here
one optimizer serves all, and what arrives together is stepped together: with foreach and fused forms, in an order that
is the same on all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime.nn.replaced import follow
from msrun.runtime.optim.host_steps import find_offload
from msrun.runtime.optim.of_parts import step_parameters


class StepsInBackward:
    """Takes gradients as they arrive and lets an optimizer step with them.

    Raises:
        StrategyError: an optimizer that needs all gradients at once, or the loss again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise StrategyError("step_in_backward(LBFGS): it needs all gradients at once: use AdamW or another one")
        if not isinstance(optimizer, torch.optim.Optimizer) or not _steps_without_words(optimizer):
            raise StrategyError(
                f"step_in_backward({type(optimizer).__name__}): must be a torch.optim.Optimizer whose step() needs no "
                "arguments"
            )
        self.optimizer = optimizer

    def trained(self) -> set[int]:
        """Return the ids of the parameters that the optimizer trains."""
        follow(self.optimizer)
        return {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}

    def take(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Step with these gradients of stored parts, beside what their parameters hold already; drops both."""
        with torch.no_grad():
            for parameter, gradient in gradients:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            step_parameters(self.optimizer, [parameter for parameter, _ in gradients])
            for parameter, _ in gradients:
                parameter.grad = None

    def finish(self) -> None:
        """Count what was copied as one step."""
        host = find_offload(self.optimizer)
        if host is not None:
            host.note_step()


def _steps_without_words(optimizer: torch.optim.Optimizer) -> bool:
    words = list(inspect.signature(optimizer.step).parameters.values())
    return all(word.default is not word.empty or word.kind in (word.VAR_POSITIONAL, word.VAR_KEYWORD) for word in words)
