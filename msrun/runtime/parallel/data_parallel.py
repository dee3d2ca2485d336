"""Data parallel without capture: torch's DistributedDataParallel, with the global loss as the result.

For networks that cannot be captured. Every rank passes its own part of the batch, parameters stay whole, gradients are
averaged by DDP while the backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree


class DataParallelCall:
    """One network under DDP. Made by AutoParallel at its first call; all ranks make it together.

    DDP starts every rank from rank 0's parameters and buffers.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        ids = [device.index] if device.type == "cuda" else None
        trainable = any(parameter.requires_grad for parameter in network.parameters())
        self._call: nn.Module = DistributedDataParallel(network, device_ids=ids) if trainable else network

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the network's result; scalar results are means over all ranks, others are this rank's own."""
        result = self._call(*args, **kwargs)
        return pytree.tree_map(lambda x: _mean_of_ranks(x) if isinstance(x, Tensor) and x.dim() == 0 else x, result)


class _MeanOfRanks(torch.autograd.Function):
    """Forward: the mean over ranks. Backward: the gradient as it is, because DDP takes the mean of the gradients."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _mean_of_ranks(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    mean: Tensor = _MeanOfRanks.apply(value)
    return mean
