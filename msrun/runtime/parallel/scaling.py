"""The one place that says how the losses of parts make the loss of the whole.

torch (default): the loss of a step is the mean over its parts, so a mean loss stays the mean over the global batch
however the batch is divided. mindspore: losses of parts are added up. Of n copies (`MicroBatchInterleaved`) gradients
are added up as well, so they are n times as large, which there is left to the learning rate; of n micro batches
(`GradAccumulation`, `Pipeline`) gradients are scaled by 1/n (nn/wrap/cell_wrapper.py: sens = 1 / micro_size).
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from msrun.errors import StrategyError

Compat = Literal["torch", "mindspore"]

current_compat: ContextVar[Compat] = ContextVar("current_compat", default="torch")
"""Set by AutoParallel while it calls a network."""


@dataclass(frozen=True)
class Scales:
    """Factors of the loss of one part of a batch, and of its gradient."""

    loss: float
    gradient: float


def check_compat(compat: str) -> None:
    """Refuse an unknown word.

    Raises:
        StrategyError: neither torch nor mindspore.
    """
    if compat not in ("torch", "mindspore"):
        raise StrategyError(f"compat={compat!r}: must be torch (means) or mindspore (sums)")


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
