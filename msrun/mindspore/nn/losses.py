"""Losses that torch has not, the base of one's own, and the cells that join a network with its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msrun.errors import UsageError
from msrun.mindspore.nn.cells import Cell
from msrun.runtime.nn.with_loss import WithLoss


class LossBase(Cell):
    """Base of one's own losses: `construct` returns `self.get_loss(x)`, reduced as `reduction` says.

    Raises:
        UsageError: another reduction than mean, sum and none.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none", None):
            raise UsageError(f"{self.cls_name}(reduction={reduction!r}): one of mean, sum, none")
        self.reduction = reduction
        self.reduce, self.average = reduction in ("mean", "sum"), reduction == "mean"

    def get_axis(self, x: Tensor) -> tuple[int, ...]:
        """Return all dimensions."""
        return tuple(range(x.dim()))

    def get_loss(self, x: Tensor, weights: Any = 1.0) -> Tensor:
        """Return the weighted losses, reduced."""
        x = weights * x
        return x if not self.reduce else x.mean() if self.average else x.sum()


class SoftmaxCrossEntropyWithLogits(LossBase):
    """Cross-entropy of scores (n, classes).

    Args:
        sparse: labels are class numbers (n,); False: one-hot rows or probabilities (n, classes).
        reduction: "none", MindSpore's default, "mean" or "sum".
    """

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.sparse = sparse

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        dtype = torch.int64 if self.sparse else logits.dtype
        labels = labels if labels.dtype == dtype else labels.to(dtype)
        return F.cross_entropy(logits, labels, reduction=self.reduction)


class RMSELoss(LossBase):
    """Root of the mean of squared differences."""

    def construct(self, logits: Tensor, label: Tensor) -> Tensor:
        """Return the loss."""
        return F.mse_loss(logits, label).sqrt()


class DiceLoss(LossBase):
    """1 - 2 |a b| / (|a| + |b|), of masks."""

    def __init__(self, smooth: float = 1e-5) -> None:
        super().__init__()
        self.smooth = smooth

    def construct(self, logits: Tensor, label: Tensor) -> Tensor:
        """Return the loss."""
        common = (logits * label).sum()
        return 1 - (2 * common + self.smooth) / (logits.square().sum() + label.square().sum() + self.smooth)


class FocalLoss(LossBase):
    """Cross-entropy with less weight on what is classified well.

    Args:
        gamma: how much less.
    """

    def __init__(self, weight: Tensor | None = None, gamma: float = 2.0, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.weight, self.gamma = weight, gamma

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of scores (n, classes, ...) with labels of one channel, or one-hot."""
        scores = logits.reshape(*logits.shape[:2], -1)
        target = labels.reshape(labels.shape[0], labels.shape[1], -1)
        logs = scores.log_softmax(1)
        if target.shape[1] == 1:
            target = torch.zeros_like(logs).scatter(1, target.long(), 1.0)
        weights = 1.0 if self.weight is None else self.weight.reshape(1, -1, 1)
        each = -(weights * (1 - logs.exp()) ** self.gamma * logs * target)
        return self.get_loss(each.sum(1).mean(-1))


class WithLossCell(Cell, WithLoss):
    """A network and its loss as one cell: `loss_fn(backbone(data), label)`."""

    _auto_prefix = False

    def __init__(self, backbone: nn.Module, loss_fn: Any) -> None:
        WithLoss.__init__(self, backbone, loss_fn)

    backbone_network = property(lambda self: self.network)
    """The network without its loss."""

    def __getattr__(self, name: str) -> Any:
        names = {"_backbone": "network", "_loss_fn": "loss_fn"}  # those that subclasses of MindSpore's read
        return super().__getattr__(names.get(name, name))


class WithEvalCell(Cell):
    """A network and its loss as one cell that returns (loss, outputs, label), for `Model(eval_network=)`."""

    def __init__(self, network: nn.Module, loss_fn: Any, add_cast_fp32: bool = False) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.loss_fn, self.add_cast_fp32 = network, loss_fn, add_cast_fp32

    def construct(self, data: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (loss, outputs, label)."""
        outputs = self.network(data)
        if self.add_cast_fp32:
            outputs = outputs.float()
        return self.loss_fn(outputs, label), outputs, label
