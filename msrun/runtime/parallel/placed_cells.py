"""Modules that one process computes for all: MindSpore's distributed graph partition, `cell.place("MS_WORKER", 1)`.

Every process runs the script on the data and the first values of rank 0. A placed cell is computed by its process
alone, forward and backward; all others get its result, and its gradients, so that all stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from msrun.errors import StrategyError, UsageError
from msrun.runtime.agreement import gather
from msrun.runtime.parallel.communication import broadcast
from msrun.runtime.parallel.context import get_auto_parallel_context, has_parallel_mode
from msrun.runtime.world import device, get_group_size, get_rank

_PLACE = "_place"
"""The attribute of a placed cell: the rank that computes it."""


def place(cell: nn.Module, forward: Callable[..., Any], role: str, rank_id: int) -> None:
    """Let one process compute a cell.

    Args:
        forward: of the cell's class.
        role: "MS_WORKER".
        rank_id: of the process.
    """
    size = get_group_size()
    if role != "MS_WORKER" or isinstance(rank_id, bool) or not isinstance(rank_id, int) or not 0 <= rank_id < size:
        raise UsageError(
            f'place({role!r}, {rank_id!r}): "MS_WORKER" and a rank from 0 to {size - 1} (call init() first)'
        )
    if has_parallel_mode():
        mode = get_auto_parallel_context("parallel_mode")
        raise StrategyError(
            f"place(): parallel_mode={mode!r} says itself which rank computes what; leave one of them out"
        )
    vars(cell)[_PLACE] = rank_id
    if size > 1:
        vars(cell)["forward"] = lambda *inputs: _run(cell, forward, rank_id, inputs)


def is_placed(network: Any) -> bool:
    """Return whether processes share out the cells of a network."""
    is_shared = isinstance(network, nn.Module) and get_group_size() > 1
    return is_shared and any(_PLACE in vars(module) for module in network.modules())


@torch.no_grad()
def share_values(network: nn.Module) -> None:
    """Give every process rank 0's parameters and buffers."""
    for value in (*network.parameters(), *network.buffers()):
        value.copy_(broadcast(value, 0))


def share_batch(batch: Any) -> Any:
    """Return rank 0's batch, of which every process has one of its own."""
    shapes = gather(pytree.tree_map_only(Tensor, lambda one: (one.shape, one.dtype), batch), what="rank 0's batch")[0]
    own, structure = pytree.tree_flatten(batch)
    theirs = pytree.tree_leaves(shapes, is_leaf=lambda one: isinstance(one, tuple) and isinstance(one[0], torch.Size))
    return pytree.tree_unflatten(
        [
            broadcast(
                one if (one.shape, one.dtype) == their else torch.empty(their[0], dtype=their[1], device=one.device), 0
            )
            if isinstance(one, Tensor)
            else their
            for one, their in zip(own, theirs, strict=True)
        ],
        structure,
    )


class SharedBatches:
    """A data set of which every process gets rank 0's batches."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return map(share_batch, self._batches)


def _run(cell: nn.Module, forward: Callable[..., Any], rank: int, inputs: Sequence[Any]) -> Any:
    """Compute a cell on its process, and give all others the result."""
    if any(not isinstance(one, Tensor) for one in inputs):
        raise UsageError(f"place({rank}): {type(cell).__name__} takes more than tensors, which processes do not share")
    trained = [parameter for parameter in cell.parameters() if parameter.requires_grad]
    return _OnOneRank.apply(lambda *given: forward(cell, *given), cell, rank, len(inputs), *inputs, *trained)


class _OnOneRank(Function):
    """A function of inputs and parameters that one rank computes; all hold the same ones."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], cell: nn.Module, rank: int, count: int, *tensors: Tensor
    ) -> Tensor:
        ctx.rank, ctx.needed = rank, ctx.needs_input_grad[4:]
        is_here = get_rank() == rank
        result: Any = None
        if is_here:
            inputs = [one.detach().requires_grad_(one.requires_grad) for one in tensors[:count]]
            with torch.enable_grad():
                result = function(*inputs)
            ctx.graph = result, [*inputs, *tensors[count:]]
        ctx.shapes = [(one.shape, one.dtype) for one in tensors]
        found = gather((result.shape, result.dtype) if isinstance(result, Tensor) else None, what="a placed cell")[rank]
        if found is None:
            raise UsageError(f"place({rank}): {type(cell).__name__} returns more than one tensor, or something else")
        for buffer in cell.buffers():
            value = broadcast(buffer, rank)
            if not is_here:
                buffer.copy_(value)
        return broadcast(result.detach() if is_here else torch.empty(found[0], dtype=found[1], device=device()), rank)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if get_rank() == ctx.rank:
            result, tensors = ctx.graph
            wanted = [one for one, is_needed in zip(tensors, ctx.needed, strict=True) if is_needed]
            own = list(torch.autograd.grad(result, wanted, gradient, allow_unused=True, materialize_grads=True))
        else:
            shapes = [shape for shape, is_needed in zip(ctx.shapes, ctx.needed, strict=True) if is_needed]
            own = [torch.empty(shape, dtype=dtype, device=device()) for shape, dtype in shapes]
        gradients = iter([broadcast(one, ctx.rank) for one in own])
        return (None, None, None, None, *(next(gradients) if is_needed else None for is_needed in ctx.needed))
