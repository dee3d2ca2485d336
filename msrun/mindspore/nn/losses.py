"""Losses with MindSpore's arguments, and the cells that join a network with its loss and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msrun.errors import UsageError
from msrun.mindspore.nn.cell import Cell
from msrun.runtime.nn.with_loss import WithLoss


class CrossEntropyLoss(Cell, nn.CrossEntropyLoss):
    """Cross-entropy of scores (n, classes, ...) with class numbers of any integer type, or probabilities."""

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        nn.CrossEntropyLoss.__init__(
            self, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        return super().forward(input, _as_classes(target))


class NLLLoss(Cell, nn.NLLLoss):
    """Negative log-likelihood of log-probabilities (n, classes, ...) with class numbers of any integer type."""

    def __init__(self, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean") -> None:
        nn.NLLLoss.__init__(self, weight, ignore_index=ignore_index, reduction=reduction)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        return super().forward(input, _as_classes(target))


class SoftmaxCrossEntropyWithLogits(Cell):
    """Cross-entropy of scores (n, classes).

    Args:
        sparse: labels are class numbers (n,); False: one-hot rows or probabilities (n, classes).
        reduction: "none", MindSpore's default, "mean" or "sum".
    """

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__()
        if reduction not in ("none", "mean", "sum"):
            raise UsageError(f"SoftmaxCrossEntropyWithLogits(reduction={reduction!r}): one of none, mean, sum")
        self.sparse, self.reduction = sparse, reduction

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        dtype = torch.int64 if self.sparse else logits.dtype
        labels = labels if labels.dtype == dtype else labels.to(dtype)
        return F.cross_entropy(logits, labels, reduction=self.reduction)


class _OfDifferences(Cell):
    def __init__(self, reduction: str = "mean") -> None:
        super(Cell, self).__init__(reduction=reduction)


class MSELoss(_OfDifferences, nn.MSELoss):
    """Mean of squared differences."""


class L1Loss(_OfDifferences, nn.L1Loss):
    """Mean of absolute differences."""


class BCEWithLogitsLoss(Cell, nn.BCEWithLogitsLoss):
    """Binary cross-entropy of scores."""

    def __init__(self, reduction: str = "mean", weight: Tensor | None = None, pos_weight: Tensor | None = None) -> None:
        nn.BCEWithLogitsLoss.__init__(self, weight, reduction=reduction, pos_weight=pos_weight)


class WithLossCell(Cell, WithLoss):
    """A network and its loss as one cell: `loss_fn(backbone(data), label)`."""

    def __init__(self, backbone: nn.Module, loss_fn: Any) -> None:
        WithLoss.__init__(self, backbone, loss_fn)


class WithEvalCell(Cell):
    """A network and its loss as one cell that returns (loss, outputs, label), for `Model(eval_network=)`."""

    def __init__(self, network: nn.Module, loss_fn: Any, add_cast_fp32: bool = False) -> None:
        super().__init__()
        self.network, self.loss_fn, self.add_cast_fp32 = network, loss_fn, add_cast_fp32

    def construct(self, data: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (loss, outputs, label)."""
        outputs = self.network(data)
        if self.add_cast_fp32:
            outputs = outputs.float()
        return self.loss_fn(outputs, label), outputs, label


class TrainOneStepCell:
    """`TrainOneStepCell(network, optimizer)(*batch)` trains one step and returns the loss.

    Args:
        network: returns its loss; a cell, or an AutoParallel of one.
        sens: factor of the gradients, for optimizers that take it out again.
    """

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, sens: float = 1.0) -> None:
        self.network, self.optimizer, self.sens = network, optimizer, sens

    def set_train(self, mode: bool = True) -> TrainOneStepCell:
        """Set the training mode of the network."""
        self.network.train(mode)
        return self

    def __call__(self, *inputs: Any) -> Tensor:
        loss: Tensor = self.network(*inputs)
        (loss * self.sens if self.sens != 1.0 else loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _as_classes(target: Tensor) -> Tensor:
    return target if target.is_floating_point() or target.dtype == torch.int64 else target.long()
