"""Communication operators for networks that are cut by hand, with gradients.

The results are those of MindSpore's primitives of the same names, and so are the gradients: those of the sum of all
ranks' losses (`mindspore/ops/_grad_experimental/grad_comm_ops.py`).

    operator              gradient of its input
    all_reduce sum        all_reduce sum
    all_reduce max, min   all_reduce sum, where the input is the result; elsewhere 0
    all_gather            reduce_scatter sum
    reduce_scatter sum    all_gather
    broadcast             sum at the root, 0 elsewhere (MindSpore passes the gradient through, which is no derivative)
    all_to_all            all_to_all back

In a world of one process, and in a group of one, each returns its input. Every rank of the group calls it with equal
shapes. `group` is a name given to `create_group`; None is the world.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from msrun.errors import StrategyError, near_miss
from msrun.runtime import groups, world
from msrun.runtime.capture import marked_calls
from msrun.runtime.execute.transfers import (
    start_all_reduce,
    start_exchange,
    start_gather,
    start_reduce_scatter,
    traffic,
)
from msrun.runtime.progress import waiting_in

_EXTREMES = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(x: Tensor, op: str = "sum", group: str | None = None) -> Tensor:
    """Return the sum, max or min of all ranks' `x`, element by element.

    Raises:
        StrategyError: another `op`.
    """
    members = _members("all_reduce", group)
    if op != "sum" and op not in _EXTREMES:
        raise StrategyError(f"all_reduce(op={op!r}){near_miss(str(op), ['sum', *_EXTREMES])}: must be sum, max or min")
    if members is None:
        return x
    result: Tensor = _Sum.apply(x, members) if op == "sum" else _Extreme.apply(x, op, members)
    return result


def all_gather(x: Tensor, dim: int = 0, group: str | None = None) -> Tensor:
    """Join the ranks' parts along `dim`: (.., n, ..) -> (.., n * ranks, ..)."""
    members = _members("all_gather", group)
    dim = _dimension(x, dim, "all_gather")
    if members is None:
        return x
    result: Tensor = _Gather.apply(x, dim, members)
    return result


def reduce_scatter(x: Tensor, op: str = "sum", dim: int = 0, group: str | None = None) -> Tensor:
    """Sum over the ranks and keep this rank's part of `dim`: (.., n * ranks, ..) -> (.., n, ..).

    Raises:
        StrategyError: another `op`, whose gradient MindSpore does not know either, or a size that does not divide.
    """
    members = _members("reduce_scatter", group)
    dim = _dimension(x, dim, "reduce_scatter")
    if op != "sum":
        raise StrategyError(f"reduce_scatter(op={op!r}): must be sum")
    if members is None:
        return x
    _check_divides(x, dim, members, "reduce_scatter")
    result: Tensor = _ReduceScatter.apply(x, dim, members)
    return result


def broadcast(x: Tensor, root_rank: int = 0, group: str | None = None) -> Tensor:
    """Return the `x` of one rank on all ranks.

    Args:
        root_rank: its rank in the world.

    Raises:
        StrategyError: a rank that is not in the group.
    """
    members = _members("broadcast", group)
    ranks = groups.get_process_group_ranks(group) if group is not None else range(world.get_group_size())
    if root_rank not in ranks:
        raise StrategyError(f"broadcast(root_rank={root_rank}): must be one of the group's ranks {list(ranks)}")
    if members is None:
        return x
    result: Tensor = _Broadcast.apply(x, root_rank, members)
    return result


def all_to_all(x: Tensor, split_dim: int = 0, concat_dim: int = 0, group: str | None = None) -> Tensor:
    """Cut `split_dim` over the ranks, send every rank its part, and join what arrives along `concat_dim`.

    MindSpore's AlltoAll with split_count = number of ranks.

    Raises:
        StrategyError: a size that does not divide.
    """
    members = _members("all_to_all", group)
    split_dim, concat_dim = _dimension(x, split_dim, "all_to_all"), _dimension(x, concat_dim, "all_to_all")
    if members is None:
        return x
    _check_divides(x, split_dim, members, "all_to_all")
    result: Tensor = _Exchange.apply(x, split_dim, concat_dim, members)
    return result


def _members(name: str, group: str | None) -> dist.ProcessGroup | None:
    """Return torch's group; None where there is nobody to talk to."""
    if marked_calls.MSRUN_CAPTURING:
        raise marked_calls.NotWhileCapturing(
            f"{name} is written by hand, but this mode makes the collectives itself: use "
            'parallel_mode="hybrid_parallel"'
        )
    if world.get_group_size() == 1:
        return None
    if group is None:
        return dist.group.WORLD
    groups.get_group_rank_from_world_rank(world.get_rank(), group)  # refuses those outside
    return groups.process_group(group)


def _dimension(x: Tensor, dim: int, name: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise StrategyError(f"{name}: dimension {dim} of a tensor of shape {tuple(x.shape)}: it has {x.dim()}")
    return dim % x.dim()


def _check_divides(x: Tensor, dim: int, members: dist.ProcessGroup, name: str) -> None:
    ranks = dist.get_world_size(members)
    if x.shape[dim] % ranks:
        raise StrategyError(
            f"{name}: dimension {dim} has size {x.shape[dim]}, which {ranks} ranks do not divide; pad it"
        )


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, members: dist.ProcessGroup) -> Tensor:
        ctx.members = members
        return start_all_reduce(x, members).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return start_all_reduce(gradient, ctx.members).wait(), None


class _Extreme(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, members: dist.ProcessGroup) -> Tensor:
        ctx.members = members
        result = x.detach().clone(memory_format=torch.contiguous_format)
        traffic.add("all_reduce", result)
        with waiting_in(lambda: f"all_reduce {op} of {dist.get_world_size(members)} ranks"):
            dist.all_reduce(result, _EXTREMES[op], group=members)
        ctx.save_for_backward(x == result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (is_result,) = ctx.saved_tensors
        return start_all_reduce(gradient, ctx.members).wait() * is_result, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, members: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.members = dim, members
        return start_gather(x, members, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return start_reduce_scatter(gradient, ctx.members, ctx.dim).wait(), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, members: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.members = dim, members
        return start_reduce_scatter(x, members, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return start_gather(gradient, ctx.members, ctx.dim).wait(), None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, root_rank: int, members: dist.ProcessGroup) -> Tensor:
        ctx.root_rank, ctx.members = root_rank, members
        result = x.detach().clone(memory_format=torch.contiguous_format)
        traffic.add("broadcast", result)
        with waiting_in(lambda: f"broadcast of {dist.get_world_size(members)} ranks"):
            dist.broadcast(result, root_rank, group=members)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = start_all_reduce(gradient, ctx.members).wait()
        return (total if world.get_rank() == ctx.root_rank else torch.zeros_like(total)), None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, concat_dim: int, members: dist.ProcessGroup) -> Tensor:
        ctx.split_dim, ctx.concat_dim, ctx.members = split_dim, concat_dim, members
        return start_exchange(x, members, split_dim, concat_dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return start_exchange(gradient, ctx.members, ctx.concat_dim, ctx.split_dim).wait(), None, None, None
