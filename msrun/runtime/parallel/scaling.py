"""The one place that says how the losses of parts make the loss of the whole.

torch (default): the loss of a step is the mean over its parts, so a mean loss stays the mean over the global batch
however the batch is divided. mindspore: parts are added up, as `MicroBatchInterleaved` does there; the gradient is
then n times as large, which there is left to the learning rate.
"""

from __future__ import annotations

from typing import Literal

from msrun.errors import StrategyError

Compat = Literal["torch", "mindspore"]


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


def step_gradient_scale(micro_batches: int) -> float:
    """Return the factor of every micro batch's gradient in a step of several, whatever its losses become.

    With compat="mindspore" `Pipeline` returns the sum of the losses, but its training step scales the gradient by
    1 / micro_size (mindspore.nn.wrap.cell_wrapper, train.amp): the gradient is that of the mean either way.
    """
    return 1.0 / micro_batches


def describe(compat: Compat) -> str:
    """Return the choice in words, for the first log line."""
    if compat == "torch":
        return "losses are means over the global batch (torch)"
    return "losses of copies are added up (MindSpore)"
