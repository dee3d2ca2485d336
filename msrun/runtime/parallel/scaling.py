"""The one place that says how the losses of parts make the loss of the whole.

torch (default): the loss of a step is the mean over its parts, so a mean loss stays the mean over the global batch
however the batch is divided. mindspore: losses of parts are added up, and in the modes without capture those of the
ranks too. Of n copies (`MicroBatchInterleaved`) gradients
are added up as well, so they are n times as large, which there is left to the learning rate; of n micro batches
(`GradAccumulation`, `Pipeline`) gradients are scaled by 1/n (nn/wrap/cell_wrapper.py: sens = 1 / micro_size).

The loss of a step is the mean of the losses that the ranks begin their backward passes with (`border.py`). So outside
of steps, the gradient of a value of which each of n ranks has its part is n times that of the whole loss.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from msrun import contract
from msrun.errors import StrategyError

Compat = Literal["torch", "mindspore"]

COMPATS = ("torch", "mindspore")
current_compat: ContextVar[Compat | None] = ContextVar("current_compat", default=None)
"""Set by set_auto_parallel_context, and by AutoParallel while it calls a network; None: the process's."""
current_loss_scale: ContextVar[float] = ContextVar("current_loss_scale", default=1.0)
"""Set by AutoParallel while it calls a network: what backward passes inside the call, of micro batches, begin with. The
gradients that they leave hold it once, as those of a backward pass after the call do."""


_defaults: list[Compat] = ["torch"]
"""What the process means last is its default."""


def choose_default_compat(compat: Compat) -> None:
    """Choose what this process means where neither the context nor an AutoParallel says it."""
    _defaults.append(compat)


def find_compat() -> Compat:
    """Return what holds here: as AutoParallel or the context says, else the environment, else the process's default.

    Raises:
        StrategyError: MSRUN_MINDSPORE_SEMANTICS is neither torch nor mindspore.
    """
    compat = current_compat.get() or _defaults[-1]
    if current_compat.get() is None and compat == "mindspore":
        compat = os.environ.get(contract.MSRUN_MINDSPORE_SEMANTICS) or compat  # type: ignore[assignment]
        check_compat(compat, contract.MSRUN_MINDSPORE_SEMANTICS)
    return compat


@dataclass(frozen=True)
class Scales:
    """Factors of the loss of one part of a batch, and of its gradient."""

    loss: float
    gradient: float


def check_compat(compat: str, name: str = "compat") -> None:
    """Refuse an unknown word.

    Raises:
        StrategyError: neither torch nor mindspore.
    """
    if compat not in COMPATS:
        raise StrategyError(f"{name}={compat!r}: must be torch (means) or mindspore (sums)")


def part_scale(compat: Compat, parts: int) -> float:
    """Return the factor of every part's loss, and so of its gradient."""
    return 1.0 / parts if compat == "torch" else 1.0


def scales(compat: Compat, copies: int, micro_batches: int) -> Scales:
    """Return the factors for a batch of so many copies in each of so many micro batches."""
    of_copies = part_scale(compat, copies)
    return Scales(of_copies * part_scale(compat, micro_batches), of_copies / micro_batches)


def describe(compat: Compat) -> str:
    """Return the choice in words, for the first log line."""
    if compat == "torch":
        return "losses are means over the global batch (torch)"
    return "losses of copies are added up (MindSpore)"


def result_factor(parts: int) -> float:
    """Return the factor of the gradient that comes in at a result of a captured step that is cut into so many parts."""
    return 1.0 / parts


def input_factor(parts: int) -> float:
    """Return the factor of the gradient that a captured step hands on to an input that is cut into so many parts."""
    return float(parts)


def leaf_factor(parts: int) -> float:
    """Return the factor of what has arrived at a leaf of which each of so many parts of the ranks has its own."""
    return 1.0 / parts


@dataclass(frozen=True)
class ReplicaScales:
    """Factors of a mode without capture, in which the gradients of whole parameters are averaged over the ranks."""

    start: float
    """Of the gradient with which every rank's backward pass begins."""
    own: float
    """Of gradients that are this rank's alone, of its inputs and of layerwise_parallel parameters, in the end."""

    @property
    def input(self) -> float:
        """Of the gradient that a step hands on to an input, where it is again that of the rank's own loss."""
        return 1.0 / self.start

    @property
    def leaf(self) -> float:
        """Of what has arrived at a leaf that is this rank's alone."""
        return self.own * self.start


def replica_scales(compat: Compat, averages: bool, ranks: int) -> ReplicaScales:
    """Return the factors that make gradients those of the mean (or sum) of the ranks' losses.

    A rank's own gradient counts what its loss, and through communication operators the others', change: it is that of
    the sum of the losses. MindSpore leaves it so also where it averages the others.
    """
    if averages:
        return ReplicaScales(1.0, 1.0 / ranks if compat == "torch" else 1.0)
    return ReplicaScales(float(ranks), 1.0 / ranks)


def describe_replicas(averages: bool) -> str:
    """Return in words what happens to the gradients of the ranks, for the first log line."""
    if averages:
        return "gradients are means over the ranks (torch)"
    return "gradients are added up over the ranks (MindSpore's gradients_mean=False)"


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Return a value whose gradient is multiplied on its way back."""
    if factor == 1.0 or not value.requires_grad or not torch.is_grad_enabled():
        return value
    scaled: Tensor = _ScaleGradient.apply(value, factor)
    return scaled
