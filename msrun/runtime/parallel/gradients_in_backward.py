"""What becomes of gradients while the backward pass goes on: an optimizer steps with them, or they go to the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.optim.host_steps import Offload, find_offload
from msrun.runtime.optim.host_weights import bring, own_gradient, put_own_gradient
from msrun.runtime.optim.of_parts import step_parameters
from msrun.runtime.parallel.settings import ParallelSettings


class GradientTaker(Protocol):
    """Who takes gradients as they arrive."""

    def trained(self) -> set[int]:
        """Return the ids of the parameters whose gradients it takes."""

    def take(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Take the gradients of one message."""

    def finish(self) -> None:
        """Hear that the backward pass is over."""


@dataclass
class ArrivingGradients:
    """The gradients of a network's captured calls; all calls share this object."""

    taker: GradientTaker | None = None
    """None: autograd leaves them in `.grad`."""


class GradientsToHost:
    """Brings gradients to the host as they arrive, for an optimizer that works there."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._offload()

    def trained(self) -> set[int]:
        """Return the ids of the parameters whose optimizer works on the host; those with hooks get gradients as ever,
        which their hooks see."""
        chosen = self._offload().chosen(self._optimizer)
        groups = self._optimizer.param_groups
        return {id(p) for group in groups for p in group["params"] if id(p) in chosen and not p._backward_hooks}

    def take(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Start copying the gradients of one message."""
        bring(self._offload().weights, gradients)

    def finish(self) -> None:
        """Leave the gradients to `step()`."""

    def watch_backward(self) -> None:
        """Take the gradients of one process, where autograd gives them, one parameter at a time."""
        chosen = self._offload().chosen(self._optimizer)

        def take(parameter: Any) -> None:
            gradient = own_gradient(parameter)
            if gradient is not None and id(parameter) in chosen and not parameter._backward_hooks:
                put_own_gradient(parameter, None)
                self.take([(parameter, gradient)])

        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(take)

    def _offload(self) -> Offload:
        found = find_offload(self._optimizer)
        if found is None:
            raise StrategyError(
                f"offload_gradients({type(self._optimizer).__name__}): the optimizer works on the device: call "
                "optim.offload(optimizer) first"
            )
        return found


class GradientsInBackward:
    """What AutoParallel can be told to do with gradients while the backward pass goes on."""

    settings: ParallelSettings
    network: Callable[..., Any]
    _arriving: ArrivingGradients

    def step_in_backward(self, optimizer: torch.optim.Optimizer) -> Self:
        """Let an optimizer step during the backward pass, with each message of gradients as it arrives.

        Gradients are not kept, so a rank never holds those of all parameters, and the step overlaps with what is still
        computed and sent. `optimizer.step()` in the training loop may stay: it finds no gradients. What needs all
        gradients at once has no place: clipping by the global norm, several backward passes for one step, micro
        batches, pipelines, loss scales. In a world of one process nothing changes.

        Raises:
            StrategyError: one of these, a mode without capture, or an optimizer that cannot step so.
        """
        self._check_taker("step_in_backward")
        self._arriving.taker = StepsInBackward(optimizer)
        return self

    def offload_gradients(self, optimizer: torch.optim.Optimizer) -> Self:
        """Let gradients go to the host during the backward pass, each message as it arrives, for an optimizer there.

        The device never holds the gradients of all parameters. On the host they are added up, in float32 at least, over
        several backward passes; `.grad` is the gradient there, so that both clipping functions are right, and
        `optimizer.step()` copies none again. Micro batches, pipelines and loss scales need the gradients on the device.

        Args:
            optimizer: one that works on the host, by `target="cpu"` or `optim.offload`.

        Raises:
            StrategyError: one of these, a mode without capture, or an optimizer that works on the device.
        """
        self._check_taker("offload_gradients")
        taker = GradientsToHost(optimizer)
        if world.get_group_size() == 1:
            taker.watch_backward()
        self._arriving.taker = taker
        return self

    def check_gradients_stay(self, what: str) -> None:
        """Refuse what needs the gradients after the backward pass.

        Raises:
            StrategyError: `step_in_backward` has used them by then.
        """
        if isinstance(self._arriving.taker, StepsInBackward):
            raise StrategyError(f"{what} with step_in_backward, which keeps no gradients: leave one of them out")

    def _check_taker(self, word: str) -> None:
        self.settings.check_setter(word, {})
        wrong = {
            "a step function": not isinstance(self.network, nn.Module),
            "pipeline(stages=...)": self.settings.pipeline.stages > 1,
            "a loss scale": self.settings.precision is not None and self.settings.precision.loss_scale is not None,
        }
        what = next((word for word, is_so in wrong.items() if is_so), None)
        if what is not None:
            raise StrategyError(f"{word} with {what}, which needs all gradients at once: leave one of both out")


class StepsInBackward:
    """Takes gradients as they arrive and lets an optimizer step with them."""

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
