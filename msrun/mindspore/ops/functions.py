"""Operators as functions, with MindSpore's names and arguments, on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msrun.runtime import value_and_grad

Axis = int | Sequence[int] | None

__all__ = [
    "absolute",
    "add",
    "bias_add",
    "cast",
    "concat",
    "cross_entropy",
    "depend",
    "div",
    "equal",
    "exp",
    "expand_dims",
    "flatten",
    "gelu",
    "log",
    "log_softmax",
    "matmul",
    "maximum",
    "mean",
    "minimum",
    "mul",
    "neg",
    "one_hot",
    "ones_like",
    "pow",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
    "relu",
    "reshape",
    "scalar_to_array",
    "shape",
    "sigmoid",
    "softmax",
    "sqrt",
    "square",
    "squeeze",
    "sub",
    "tanh",
    "transpose",
    "value_and_grad",
    "zeros_like",
]

absolute, add, div, equal, exp, log = torch.abs, torch.add, torch.div, torch.eq, torch.exp, torch.log
matmul, maximum, minimum, mul, neg = torch.matmul, torch.maximum, torch.minimum, torch.mul, torch.neg
ones_like, zeros_like, sqrt, square, sub = torch.ones_like, torch.zeros_like, torch.sqrt, torch.square, torch.sub
relu, sigmoid, tanh = torch.relu, torch.sigmoid, torch.tanh
pow = torch.pow


def shape(x: Tensor) -> tuple[int, ...]:
    """Return the shape."""
    return tuple(x.shape)


def scalar_to_array(value: float) -> Tensor:
    """Return a number as a tensor without dimensions."""
    return torch.tensor(value)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the elements as another type."""
    return x.to(dtype)


def depend(value: Any, _expression: Any) -> Any:
    """Return the value; operators run in the order in which they are written."""
    return value


def reshape(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the elements in another shape."""
    return x.reshape(tuple(sizes))


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the tensor with its dimensions in another order."""
    return x.permute(tuple(axes))


def flatten(x: Tensor) -> Tensor:
    """(n, ...) -> (n, product)."""
    return x.flatten(1)


def expand_dims(x: Tensor, axis: int) -> Tensor:
    """Add a dimension of size 1."""
    return x.unsqueeze(axis)


def squeeze(x: Tensor, axis: Axis = ()) -> Tensor:
    """Take dimensions of size 1 away: those of `axis`, or all."""
    chosen = _axes(axis)
    return x.squeeze(chosen) if chosen else x.squeeze()


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join tensors along a dimension."""
    return torch.cat(tuple(tensors), axis)


def bias_add(x: Tensor, bias: Tensor) -> Tensor:
    """Add a bias (channels,) to (n, channels, ...)."""
    return x + bias.reshape(-1, *[1] * (x.dim() - 2))


def one_hot(indices: Tensor, depth: int, on_value: Any = 1.0, off_value: Any = 0.0, axis: int = -1) -> Tensor:
    """Return rows of `depth` elements: `on_value` at the index, `off_value` elsewhere.

    Args:
        indices: (...) of any integer type.
        axis: the new dimension; -1 is the last one.
    """
    hit = indices.unsqueeze(axis).long()
    sizes = [1] * hit.dim()
    sizes[axis] = depth
    is_on = hit == torch.arange(depth, device=indices.device).reshape(sizes)
    dtype = on_value.dtype if isinstance(on_value, Tensor) else torch.get_default_dtype()
    return is_on.to(dtype) * (on_value - off_value) + off_value


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Softmax along a dimension."""
    return F.softmax(x, axis)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Logarithm of softmax along a dimension."""
    return F.log_softmax(x, axis)


def gelu(x: Tensor) -> Tensor:
    """Gaussian error linear unit, tanh approximation."""
    return F.gelu(x, approximate="tanh")


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of scores with class numbers of any integer type, or probabilities."""
    if not labels.is_floating_point() and labels.dtype != torch.int64:
        labels = labels.long()
    return F.cross_entropy(logits, labels, reduction=reduction)


def reduce_sum(x: Tensor, axis: Axis = (), keep_dims: bool = False) -> Tensor:
    """Sum over dimensions; over all when none is named."""
    return x.sum(_axes(axis) or None, keep_dims)


def reduce_mean(x: Tensor, axis: Axis = (), keep_dims: bool = False) -> Tensor:
    """Mean over dimensions; over all when none is named."""
    return x.mean(_axes(axis) or None, keep_dims)


def reduce_max(x: Tensor, axis: Axis = (), keep_dims: bool = False) -> Tensor:
    """Maximum over dimensions; over all when none is named."""
    return x.amax(_axes(axis), keep_dims)


def reduce_min(x: Tensor, axis: Axis = (), keep_dims: bool = False) -> Tensor:
    """Minimum over dimensions; over all when none is named."""
    return x.amin(_axes(axis), keep_dims)


mean = reduce_mean


def _axes(axis: Axis) -> tuple[int, ...]:
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, int) else tuple(axis)
