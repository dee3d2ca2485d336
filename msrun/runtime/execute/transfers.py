"""Transfers: all-reduce, all-gather, reduce-scatter, all-to-all and halo, started now and waited for later, counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.execute.tensor_future import TensorFuture, name_of
from msrun.runtime.execute.traffic import traffic
from msrun.runtime.groups import carries_by_gloo
from msrun.runtime.sharding.halo import Message

# torch 2.13 renamed both and warns about the old names.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MOST_BROADCASTS = 8
"""Largest group of gloo's in which parameters are gathered by a broadcast from each rank."""


def start_all_reduce(value: Tensor, group: dist.ProcessGroup, *, in_place: bool = False) -> TensorFuture:
    """Sum over the group. `value` is not changed, unless `in_place`: then nobody may read it any more."""
    traffic.add("all_reduce", value)
    own = value.contiguous() if in_place else value.clone(memory_format=torch.contiguous_format)
    return TensorFuture(own, dist.all_reduce(own, group=group, async_op=True), name=name_of("all_reduce", group))


def start_gather(value: Tensor, group: dist.ProcessGroup, dim: int = 0) -> TensorFuture:
    """Join the parts of the group's ranks along `dim`: (.., n, ..) -> (.., n * group size, ..)."""
    value = value.contiguous()
    shape, size = value.shape, dist.get_world_size(group)
    flat = value.new_empty(size * value.numel())
    flat_value, name = value.view(-1), name_of("all_gather", group)
    traffic.add("all_gather", value)
    work = _all_gather_flat(flat, flat_value, group=group, async_op=True)

    def join(parts: Tensor) -> Tensor:
        if dim == 0:
            return parts.view(size * shape[0], *shape[1:])
        return torch.cat(list(parts.view(size, *shape).unbind(0)), dim)

    return TensorFuture(flat, work, join, name)


def start_gather_of(parts: Sequence[Tensor], group: dist.ProcessGroup) -> TensorFuture:
    """Join several tensors of each rank in one message: -> (group size, elements of all of them).

    They are written into this rank's place of the result, so that the message needs no memory of its own. gloo's
    all-gather takes as much again as the result, and copies it; a broadcast from each rank does neither.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    gathered = parts[0].new_empty(size, sum(part.numel() for part in parts))
    own = gathered[rank]
    torch.cat([part.reshape(-1) for part in parts], out=own)
    traffic.add("all_gather", own)
    name = name_of("all_gather", group)
    if carries_by_gloo(group, own.device) and size <= _MOST_BROADCASTS:
        sent = [
            dist.broadcast(gathered[source], group=group, group_src=source, async_op=True) for source in range(size)
        ]
        return TensorFuture(gathered, sent, name=name)
    return TensorFuture(gathered, _all_gather_flat(gathered.view(-1), own, group=group, async_op=True), name=name)


def start_reduce_scatter(value: Tensor, group: dist.ProcessGroup, dim: int = 0) -> TensorFuture:
    """Sum over the group and keep this rank's part of `dim`: (.., n * group size, ..) -> (.., n, ..).

    gloo has no real reduce-scatter; exchanging the parts and adding them up moves half the bytes of its all-reduce
    and adds in rank order on every rank.
    """
    traffic.add("reduce_scatter", value)
    size = dist.get_world_size(group)
    parts = _parts(value, size, dim)
    if not carries_by_gloo(group, value.device):
        result = torch.empty_like(parts[0])
        work = _reduce_scatter_flat(result, parts.view(-1, *parts.shape[2:]), group=group, async_op=True)
        return TensorFuture(result, work, name=name_of("reduce_scatter", group))
    return _start_exchange_and_add(parts, group)


def _start_exchange_and_add(parts: Tensor, group: dist.ProcessGroup) -> TensorFuture:
    """Reduce-scatter of gloo: (ranks, *part) -> the sum of this rank's parts, added up in rank order.

    The first and the last rank leave their own part out of the exchange; the others would have to copy what is left.
    """
    size, rank = parts.shape[0], dist.get_rank(group)
    begin, end = (1, size) if rank == 0 else (0, size - 1 if rank == size - 1 else size)
    sent = parts[begin:end]
    received = torch.empty_like(sent)
    splits = [int(begin <= other < end) for other in range(size)]
    work = dist.all_to_all_single(received, sent, splits, splits, group=group, async_op=True)

    def add_up(got: Tensor) -> Tensor:
        given = [*parts[:begin], *got, *parts[end:]]
        total = got[0].add_(parts[rank]) if size == 2 else given[0] + given[1]  # two may be added in either order
        for part in given[2:]:
            total += part
        return total

    return TensorFuture(received, work, add_up, name_of("reduce_scatter", group))


def start_exchange(value: Tensor, group: dist.ProcessGroup, dim: int, from_dim: int) -> TensorFuture:
    """Cut `dim` over the group and join `from_dim`: an all-to-all."""
    traffic.add("all_to_all", value)
    size = dist.get_world_size(group)
    parts = _parts(value, size, dim)
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=group, async_op=True)
    return TensorFuture(
        received, work, lambda got: torch.cat(list(got.unbind(0)), from_dim), name_of("all_to_all", group)
    )


def start_halo(message: Message, group: dist.ProcessGroup, join: Callable[[list[Tensor]], Tensor]) -> TensorFuture:
    """Send each rank of the group its piece, of any size, and join what the others sent."""
    traffic.add("halo", message.flat)
    received = message.flat.new_empty(sum(message.receive_sizes))
    work = dist.all_to_all_single(
        received, message.flat, message.receive_sizes, message.send_sizes, group=group, async_op=True
    )
    return TensorFuture(received, work, lambda got: join(message.pieces(got)), name_of("halo", group))


def start_row_exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> TensorFuture:
    """Send each rank of the group its rows, and join what the others sent: (sum of sent, ..) -> (sum of received, ..).

    Args:
        sent: rows for each rank, which stand in rank order.
        received: rows from each rank.
    """
    traffic.add("all_to_all", rows)
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(arrived, rows.contiguous(), [*received], [*sent], group=group, async_op=True)
    return TensorFuture(arrived, work, name=name_of("all_to_all", group))


def _parts(value: Tensor, count: int, dim: int) -> Tensor:
    """Return (count, *part shape), contiguous: the equal parts of `dim`."""
    if dim == 0:
        return value.contiguous().view(count, value.shape[0] // count, *value.shape[1:])
    return torch.stack(value.chunk(count, dim)).contiguous()  # stack keeps strides such as those of channels_last
