"""Gradients that torch's DDP and FSDP2 leave alone: those of a rank's own parts, and those of rows.

The rows of a table that a sparse layer has looked up (`nn.Embedding(sparse=True)`) are averaged over the ranks by
exchanging them, in every backward pass; the ranks' sum of several passes is the sum of the means.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.runtime.execute.row_gradients import start_row_sum
from msrun.runtime.execute.transfers import start_all_reduce
from msrun.runtime.parallel.modes.hybrid import is_layerwise
from msrun.runtime.parallel.parameters.placement import placement_of

_of_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""weight of a sparse layer -> the hook that averages its gradient"""


def has_own_gradient(parameter: Tensor) -> bool:
    """Return whether a mode without capture must leave a parameter's gradient alone."""
    return is_layerwise(parameter) or parameter in _of_rows or exchanges_rows(parameter)


def exchanges_rows(parameter: Tensor) -> bool:
    """Return whether the operator of a parameter exchanges rows, so that the ranks may hold different parts."""
    placed = placement_of(parameter)
    return placed is not None and placed.exchanges_rows


def average_rows(root: nn.Module) -> None:
    """Let the gradients of sparse layers be averaged over the ranks from now on."""
    for parameter in _weights_of_sparse_layers(root):
        if parameter not in _of_rows and not has_own_gradient(parameter):
            _of_rows[parameter] = parameter.register_hook(_average)


def _weights_of_sparse_layers(root: nn.Module) -> Iterator[Tensor]:
    for module in root.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            yield module.weight


def _average(gradient: Tensor) -> Tensor:
    """Return the mean over the ranks; a weight that is also used densely has a dense gradient."""
    assert dist.group.WORLD is not None
    ranks = dist.get_world_size()
    if gradient.is_sparse:
        return start_row_sum(gradient, dist.group.WORLD).wait() / ranks
    return start_all_reduce(gradient, dist.group.WORLD).wait() / ranks
