"""WithLoss: a network and its loss as one module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def user_name(name: str) -> str:
    """Take off what our own wrappers (WithLoss, MicroBatchInterleaved) put before a name."""
    while name.startswith("network."):
        name = name.removeprefix("network.")
    return name


class SoftmaxCrossEntropyExpand(nn.Module):
    """Cross-entropy of softmax whose batch and classes may both be cut: the loss of MindSpore's distributed example.

    MindSpore expands it into small operators because its fused loss must not be cut along the classes. Here it is
    one operator that may: `shard(loss, ((2, 4), (2,)))` cuts scores (n, classes) into 2 x 4 parts. It is computed by
    log-sum-exp, where the expanded form takes the logarithm of a softmax that is 0 for large scores.

    Args:
        sparse: labels are class numbers (n,); False: they are one-hot rows or probabilities (n, classes).
        label_smoothing: part of every label that is spread evenly over all classes.
        ignore_index: class number of samples that do not count; of `sparse` labels only.
        reduction: "mean" over the samples that count, "sum", or "none".
    """

    def __init__(
        self, sparse: bool = False, *, label_smoothing: float = 0.0, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        super().__init__()
        self.sparse = sparse
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction

    def forward(self, logit: Tensor, label: Tensor) -> Tensor:
        """Return the loss of scores (n, classes)."""
        dtype = torch.int64 if self.sparse else logit.dtype
        if label.dtype != dtype:  # a cast in vain would be an operator of the graph
            label = label.to(dtype)
        return F.cross_entropy(
            logit,
            label,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
        )


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
