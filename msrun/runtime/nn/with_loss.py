"""WithLoss: a network and its loss as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class WithLoss(nn.Module):
    """`WithLoss(net, loss_fn)(*inputs, label)` is `loss_fn(net(*inputs), label)`; MindSpore's WithLossCell."""

    def __init__(self, network: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.network = network
        self.loss_fn = loss_fn

    def forward(self, *inputs: Any) -> Tensor:
        """Return the loss; the last input is the label."""
        *data, label = inputs
        return self.loss_fn(self.network(*data), label)
