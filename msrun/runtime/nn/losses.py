"""Losses that MindSpore's examples write themselves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
