"""Operators as MindSpore's classes: made once with their settings, cut with `.shard`, called with tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from msrun import runtime
from msrun.errors import UsageError
from msrun.mindspore.ops import functions

__all__ = [
    "Abs",
    "Add",
    "AllGather",
    "AllReduce",
    "BatchMatMul",
    "BiasAdd",
    "Broadcast",
    "Cast",
    "Concat",
    "Depend",
    "Div",
    "Equal",
    "Exp",
    "ExpandDims",
    "Flatten",
    "GeLU",
    "Log",
    "LogSoftmax",
    "MatMul",
    "Maximum",
    "Minimum",
    "Mul",
    "Neg",
    "OneHot",
    "Pow",
    "Primitive",
    "ReLU",
    "RealDiv",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceOp",
    "ReduceScatter",
    "ReduceSum",
    "Reshape",
    "Shape",
    "Sigmoid",
    "Softmax",
    "Sqrt",
    "Square",
    "Squeeze",
    "Sub",
    "Tanh",
    "TensorAdd",
    "Transpose",
]


_TARGETS = {"CPU": "cpu", "Ascend": "device", "GPU": "device", "DEVICE": "device"}
"""MindSpore's word -> that of `set_target`."""


class Primitive:
    """One operator; `op.shard(in_strategy, out_strategy)` says how AutoParallel cuts it."""

    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._run = function if function is not None else type(self).function

    def __call__(self, *inputs: Any) -> Any:
        return self._run(*inputs)

    def shard(self, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None) -> Self:
        """Cut the operator: one tuple per tensor input, see `msrun.runtime.shard`. Returns the operator.

        Raises:
            StrategyError: not tuples of whole numbers above 0.
        """
        self._run = runtime.shard(self._run, in_strategy, out_strategy)
        return self

    def set_device(self, device_target: str) -> Self:
        """Run the operator on the host ("CPU") or the rank's device ("Ascend", "GPU", "DEVICE"): see
        `msrun.runtime.set_target`. Returns the operator.

        Raises:
            UsageError: another word.
        """
        if device_target not in _TARGETS:
            raise UsageError(f"device_target={device_target!r}: must be one of {', '.join(_TARGETS)}")
        self._run = runtime.set_target(self._run, _TARGETS[device_target])
        return self

    def add_prim_attr(self, name: str, value: str) -> Self:
        """`add_prim_attr("primitive_target", "CPU")` is `set_device("CPU")`; there are no other attributes here.

        Raises:
            UsageError: another attribute, or another word.
        """
        if name != "primitive_target":
            raise UsageError(f'add_prim_attr({name!r}): only "primitive_target" means something here; leave it out')
        return self.set_device(value)


def _simple(name: str, function: Callable[..., Any]) -> type[Primitive]:
    """Return the class of an operator without settings."""
    return type(name, (Primitive,), {"function": staticmethod(function), "__doc__": f"`torch.{function.__name__}`."})


Abs = _simple("Abs", torch.abs)
Add = _simple("Add", torch.add)
TensorAdd = Add
BiasAdd = _simple("BiasAdd", functions.bias_add)
Cast = _simple("Cast", functions.cast)
Depend = _simple("Depend", functions.depend)
Div = _simple("Div", torch.div)
RealDiv = Div
Equal = _simple("Equal", torch.eq)
Exp = _simple("Exp", torch.exp)
ExpandDims = _simple("ExpandDims", functions.expand_dims)
Flatten = _simple("Flatten", functions.flatten)
GeLU = _simple("GeLU", functions.gelu)
Log = _simple("Log", torch.log)
Maximum = _simple("Maximum", torch.maximum)
Minimum = _simple("Minimum", torch.minimum)
Mul = _simple("Mul", torch.mul)
Neg = _simple("Neg", torch.neg)
Pow = _simple("Pow", torch.pow)
ReLU = _simple("ReLU", torch.relu)
Reshape = _simple("Reshape", functions.reshape)
Shape = _simple("Shape", functions.shape)
Sigmoid = _simple("Sigmoid", torch.sigmoid)
Sqrt = _simple("Sqrt", torch.sqrt)
Square = _simple("Square", torch.square)
Sub = _simple("Sub", torch.sub)
Tanh = _simple("Tanh", torch.tanh)
Transpose = _simple("Transpose", functions.transpose)


class MatMul(Primitive):
    """Product of (n, k) and (k, m); a transposed input is given as (k, n) or (m, k)."""

    def __init__(self, transpose_a: bool = False, transpose_b: bool = False) -> None:
        self._transposes = transpose_a, transpose_b
        super().__init__(self._transposed if transpose_a or transpose_b else torch.matmul)

    def _transposed(self, a: Tensor, b: Tensor) -> Tensor:
        a = a.transpose(-1, -2) if self._transposes[0] else a
        if self._transposes[1]:
            return F.linear(a, b) if b.dim() == 2 else torch.matmul(a, b.transpose(-1, -2))
        return torch.matmul(a, b)


class BatchMatMul(MatMul):
    """Products of (..., n, k) and (..., k, m)."""


class _Reduce(Primitive):
    reduction: Callable[..., Tensor]

    def __init__(self, keep_dims: bool = False) -> None:
        reduction = type(self).reduction
        super().__init__(lambda x, axis=(): reduction(x, axis, keep_dims))


class ReduceSum(_Reduce):
    """Sum over dimensions; over all when none is named."""

    reduction = staticmethod(functions.reduce_sum)


class ReduceMean(_Reduce):
    """Mean over dimensions; over all when none is named."""

    reduction = staticmethod(functions.reduce_mean)


class ReduceMax(_Reduce):
    """Maximum over dimensions; over all when none is named."""

    reduction = staticmethod(functions.reduce_max)


class ReduceMin(_Reduce):
    """Minimum over dimensions; over all when none is named."""

    reduction = staticmethod(functions.reduce_min)


class Softmax(Primitive):
    """Softmax along a dimension."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(lambda x: F.softmax(x, axis))


class LogSoftmax(Primitive):
    """Logarithm of softmax along a dimension."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(lambda x: F.log_softmax(x, axis))


class OneHot(Primitive):
    """(indices, depth, on_value, off_value) -> rows with on_value at the index."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(lambda indices, depth, on, off: functions.one_hot(indices, depth, on, off, axis))


class Concat(Primitive):
    """Join tensors along a dimension."""

    def __init__(self, axis: int = 0) -> None:
        super().__init__(lambda tensors: torch.cat(tuple(tensors), axis))


class Squeeze(Primitive):
    """Take dimensions of size 1 away: those of `axis`, or all."""

    def __init__(self, axis: int | Sequence[int] = ()) -> None:
        super().__init__(lambda x: functions.squeeze(x, axis))


class ReduceOp:
    """What AllReduce and ReduceScatter do with the ranks' values."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class _Collective(Primitive):
    """Communication between the ranks of a group, for parts that are cut by hand."""

    def shard(self, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None) -> Self:
        """Refuse: what travels is what the operator says.

        Raises:
            UsageError: always.
        """
        del in_strategy, out_strategy
        raise UsageError(f"{type(self).__name__}.shard: communication written by hand has no strategy; shard operators")


class AllReduce(_Collective):
    """The sum (or another ReduceOp) of the ranks' tensors, on every rank."""

    def __init__(self, op: str = ReduceOp.SUM, group: str | None = None) -> None:
        super().__init__(lambda x: runtime.all_reduce(x, op, _group(group)))


class AllGather(_Collective):
    """The ranks' tensors, joined along dimension 0, on every rank."""

    def __init__(self, group: str | None = None) -> None:
        super().__init__(lambda x: runtime.all_gather(x, group=_group(group)))


class ReduceScatter(_Collective):
    """The sum of the ranks' tensors, of which each rank gets its part of dimension 0."""

    def __init__(self, op: str = ReduceOp.SUM, group: str | None = None) -> None:
        super().__init__(lambda x: runtime.reduce_scatter(x, op, group=_group(group)))


class Broadcast(_Collective):
    """The tensors of one rank, on every rank: takes and returns a tuple."""

    def __init__(self, root_rank: int, group: str | None = None) -> None:
        super().__init__(lambda xs: tuple(runtime.broadcast(x, root_rank, _group(group)) for x in xs))


def _group(name: str | None) -> str | None:
    return None if name in (None, "hccl_world_group", "nccl_world_group") else name
