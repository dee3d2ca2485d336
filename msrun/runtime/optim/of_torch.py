"""torch's optimizers, which can also be called with gradients, and MindSpore's Momentum, which is one of them."""

from __future__ import annotations

from typing import Any

import torch

from msrun.runtime.optim.base import Optimizer


class SGD(Optimizer, torch.optim.SGD):
    """torch.optim.SGD that also takes gradients."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.0, **settings: Any) -> None:
        super().__init__(params, lr=lr, momentum=momentum, **settings)


class Momentum(Optimizer, torch.optim.SGD):
    """MindSpore's Momentum: v = m v + g, w = w - lr v; torch.optim.SGD with momentum and no dampening."""

    def __init__(self, params: Any, learning_rate: float, momentum: float, **settings: Any) -> None:
        super().__init__(params, lr=learning_rate, momentum=momentum, **settings)


class Adam(Optimizer, torch.optim.Adam):
    """torch.optim.Adam that also takes gradients."""


class AdamW(Optimizer, torch.optim.AdamW):
    """torch.optim.AdamW that also takes gradients."""
