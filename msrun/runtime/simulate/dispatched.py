"""Operators as torch dispatches them, forward and backward: what one call of them does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from msrun.runtime.cost.operators import NOTHING, Work, is_view, operations

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
_INPUT = {"_allgather_base_": 1, "allgather_": 1, "_reduce_scatter_base_": 1, "reduce_scatter_": 1}
_INPUT |= {"alltoall_base_": 1, "alltoall_": 1}
"""Which argument of a collective this rank gives; else the first."""


def message_of(func: Any, args: Any) -> tuple[str, int] | None:
    """Return a collective's name, or "send" and "receive", and the bytes that this rank gives; None of other calls."""
    name = func.__name__.partition(".")[0]
    if name not in COLLECTIVES:
        return None
    given = [leaf for leaf in pytree.tree_leaves(args[_INPUT.get(name, 0)]) if isinstance(leaf, Tensor)]
    return COLLECTIVES[name], sum(tensor.numel() * tensor.element_size() for tensor in given)


def work_of(func: Any, args: Any, kwargs: Any, result: Any, made: Sequence[Tensor]) -> Work:
    """Return what a call does; of one that only makes a view, or memory without values, nothing.

    Args:
        made: the tensors of its result.
    """
    made = made or _written(func, args, kwargs)
    elements = sum(tensor.numel() for tensor in made)
    if not elements or "empty" in func.__name__ or (is_view(func) and not func._schema.is_mutable):
        return NOTHING
    read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    known: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    if known is not None:
        count = float(known(*args, **kwargs, out_val=result))
    else:
        count = operations(func, [tuple(tensor.shape) for tensor in read], elements)
    return Work(count, float(sum(map(_bytes, read))), float(sum(map(_bytes, made))), made[0].dtype)


def operator_name(func: Any, work: Work) -> str:
    """Return the name under which a device profile has the points of an operator."""
    return f"{func} {str(work.dtype).removeprefix('torch.')}"


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator without a result writes, such as those of `_foreach_copy_`."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | {**kwargs}
    written = [given.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Return what of a tensor is moved: an expanded one has less memory than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
