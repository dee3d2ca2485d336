"""WithLoss: a network and its loss as one module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_BY_CLASS_FUNCTIONS = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)


class WithLoss(nn.Module):
    """`WithLoss(net, loss_fn)(*inputs, label)` is `loss_fn(net(*inputs), label)`; MindSpore's WithLossCell.

    torch's losses of class numbers take int64 alone: labels of narrower integers are widened for them.
    """

    def __init__(self, network: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.network = network
        self.loss_fn = loss_fn
        self.returns: Literal["loss", "outputs", "both"] = "loss"
        """See `returning`."""

    def forward(self, *inputs: Any) -> Any:
        """Return the loss; the last input is the label."""
        if self.returns == "outputs":
            return self.network(*inputs)
        *data, label = inputs
        outputs = self.network(*data)
        loss = self.loss_fn(outputs, widen_classes(self.loss_fn, label))
        return loss if self.returns == "loss" else (loss, outputs)


@contextmanager
def returning(network: nn.Module, what: Literal["outputs", "both"]) -> Iterator[bool]:
    """Let the losses in a network give way: yield whether there is one.

    Args:
        what: "outputs": what the network returns without its loss, called without a label; "both": (loss, outputs).
    """
    holders = [module for module in network.modules() if isinstance(module, WithLoss)]
    before = [holder.returns for holder in holders]
    for holder in holders:
        holder.returns = what
    try:
        yield bool(holders)
    finally:
        for holder, mode in zip(holders, before, strict=True):
            holder.returns = mode


def widen_classes(loss_fn: Callable[..., Tensor], label: Any) -> Any:
    """Return class numbers as torch's losses take them, in int64; other labels as they are."""
    is_narrow = isinstance(label, Tensor) and label.dtype in _NARROW
    if is_narrow and (isinstance(loss_fn, _BY_CLASS) or loss_fn in _BY_CLASS_FUNCTIONS):
        return label.long()
    return label
