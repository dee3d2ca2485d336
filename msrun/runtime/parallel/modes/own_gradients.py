"""Gradients that torch's DDP and FSDP2 leave alone: of a rank's own parts, of rows, and of what is on servers.

The rows of a table that a sparse layer has looked up (`nn.Embedding(sparse=True)`) are averaged over the ranks by
exchanging them, in every backward pass; the ranks' sum of several passes is the sum of the means.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.runtime.execute.placement import placement_of
from msrun.runtime.execute.row_gradients import start_row_sum
from msrun.runtime.execute.transfers import start_all_reduce
from msrun.runtime.parallel.modes.hybrid import is_layerwise
from msrun.runtime.server.remote import find_remote

_of_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""weight of a sparse layer -> the hook that averages its gradient"""


def has_own_gradient(parameter: Tensor) -> bool:
    """Return whether a mode without capture must leave a parameter's gradient alone."""
    return parameter in _of_rows or not is_same_everywhere(parameter)


def is_same_everywhere(tensor: Tensor) -> bool:
    """Return whether all ranks hold the same of a tensor, and agree on it among themselves.

    They do not on a rank's own part, on a table whose operator exchanges rows, and on what is on servers.
    """
    placed = placement_of(tensor)
    exchanges_rows = placed is not None and placed.exchanges_rows
    return not (is_layerwise(tensor) or exchanges_rows or find_remote(tensor) is not None)


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
