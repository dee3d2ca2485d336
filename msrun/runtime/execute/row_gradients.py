"""Gradients of tables as rows: indices of the rows that have one, and their values; never the whole table.

Ranks add them up by exchanging rows, as MindSpore does (indices and values are all-gathered): what travels is what the
ranks have looked up, not the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.execute.tensor_future import TensorFuture
from msrun.runtime.execute.transfers import start_gather


def row_gradient(rows: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a sparse tensor of this shape, coalesced: values of equal rows are added up.

    Args:
        rows: (n,) numbers of rows, in any order.
        values: (n, ...) of each.
    """
    rows, values = summed_rows(rows, values)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, tuple(shape), is_coalesced=True, check_invariants=False)


def summed_rows(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows ascending, each once, and the sums of their values."""
    if _is_ascending(rows):
        return rows, values
    rows, place = torch.unique(rows, return_inverse=True)
    return rows, values.new_zeros(rows.shape[0], *values.shape[1:]).index_add_(0, place, values.contiguous())


def coalesced(gradient: Tensor) -> Tensor:
    """Return a sparse gradient whose rows are ascending, each once.

    That of one backward pass is so already, but autograd forgets it when it puts it into `.grad`.
    """
    rows = gradient._indices()
    if gradient.is_coalesced() or len(rows) != 1 or not _is_ascending(rows[0]):
        return gradient.coalesce()
    return torch.sparse_coo_tensor(rows, gradient._values(), gradient.shape, is_coalesced=True, check_invariants=False)


def _is_ascending(rows: Tensor) -> bool:
    return bool((rows[1:] > rows[:-1]).all())


def start_row_sum(gradient: Tensor, group: dist.ProcessGroup) -> TensorFuture:
    """Sum the sparse gradients of a group's ranks: the same rows and values on all of them, in rank order.

    The numbers of rows travel first, and are waited for: messages have the size of the largest one.
    """
    gradient = coalesced(gradient)
    rows, values = gradient.indices()[0], gradient.values()
    counts = start_gather(rows.new_tensor([rows.shape[0]]), group).wait().tolist()
    most = max(counts)
    if not most:
        return TensorFuture(gradient)
    of_rows, of_values = start_gather(_padded(rows, most), group), start_gather(_padded(values, most), group)

    def add_up(_: Tensor) -> Tensor:
        def joined(future: TensorFuture) -> Tensor:
            return torch.cat([part[:n] for part, n in zip(future.wait().split(most), counts, strict=True)])

        return row_gradient(joined(of_rows), joined(of_values), gradient.shape)

    return TensorFuture(gradient, None, add_up)


def added(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two gradients; it is sparse if both are."""
    return other + one if one.is_sparse else one + other  # torch adds sparse tensors to others, not the other way


def _padded(values: Tensor, length: int) -> Tensor:
    if values.shape[0] == length:
        return values
    return torch.cat([values, values.new_zeros(length - values.shape[0], *values.shape[1:])])
