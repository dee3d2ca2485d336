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

from collections.abc import Callable
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
    if op != "sum":
        extreme: Tensor = _Extreme.apply(x, op, members)
        return extreme
    return _paired(x, lambda value: _summed(value, members), lambda gradient: _summed(gradient, members))


def all_gather(x: Tensor, dim: int = 0, group: str | None = None) -> Tensor:
    """Join the ranks' parts along `dim`: (.., n, ..) -> (.., n * ranks, ..)."""
    members = _members("all_gather", group)
    dim = _dimension(x, dim, "all_gather")
    if members is None:
        return x
    return _paired(
        x,
        lambda value: start_gather(value, members, dim).wait(),
        lambda gradient: start_reduce_scatter(gradient, members, dim).wait(),
    )


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
    return _paired(
        x,
        lambda value: start_reduce_scatter(value, members, dim).wait(),
        lambda gradient: start_gather(gradient, members, dim).wait(),
    )


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

    def there(value: Tensor) -> Tensor:
        result = value.detach().clone(memory_format=torch.contiguous_format)
        traffic.add("broadcast", result)
        with waiting_in(lambda: f"broadcast of {dist.get_world_size(members)} ranks"):
            dist.broadcast(result, root_rank, group=members)
        return result

    def back(gradient: Tensor) -> Tensor:
        total = _summed(gradient, members)
        return total if world.get_rank() == root_rank else torch.zeros_like(total)

    return _paired(x, there, back)


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
    return _paired(
        x,
        lambda value: start_exchange(value, members, split_dim, concat_dim).wait(),
        lambda gradient: start_exchange(gradient, members, concat_dim, split_dim).wait(),
    )


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


def _summed(value: Tensor, members: dist.ProcessGroup) -> Tensor:
    return start_all_reduce(value, members).wait()


def _paired(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Collective.apply(x, there, back)
    return result


class _Collective(Function):
    """A collective with the one that its gradient takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


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
        return _summed(gradient, ctx.members) * is_result, None, None
