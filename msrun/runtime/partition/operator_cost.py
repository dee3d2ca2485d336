"""What an operator costs, for dividing a network into stages of equal work: operations and bytes of its parameters.

Counts are of the captured graph, on global shapes: only their proportions matter here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
OPERATIONS_PER_BYTE = 8.0
"""Operations that count as much as one byte of a parameter: what its gather, reduction and update cost in a step, and
its memory. It matters for embeddings and other large tables that compute little."""


def operator_cost(node: fx.Node) -> float:
    """Return the cost of one operator of a captured graph, in operations.

    Its parameters are not counted: see `parameter_cost`. Views and operators without a tensor result cost nothing.
    """
    result = node.meta.get("val")
    if not isinstance(result, Tensor):
        return 0.0 if not isinstance(result, list | tuple) else float(sum(_count(item) for item in result))
    shapes = [tuple(n.meta["val"].shape) for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    per_element = _OPERATIONS.get(node.target)
    if per_element is not None:
        return 2.0 * result.numel() * per_element(shapes)
    if node.target in _ATTENTION:
        return 4.0 * result.numel() * shapes[1][-2]
    return 0.0 if _is_view(node) else float(result.numel())


def parameter_cost(value: Tensor) -> float:
    """Return the cost of holding and updating one parameter, in operations."""
    return OPERATIONS_PER_BYTE * value.numel() * value.element_size()


def _count(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 0


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(returned.alias_info is not None for returned in schema.returns)


def _of_convolution(shapes: list[tuple[int, ...]]) -> int:
    """Multiplications per element of the result: input channels of a group times the kernel."""
    return math.prod(shapes[1][1:])


_OPERATIONS: Mapping[Any, Callable[[list[tuple[int, ...]]], int]] = {
    aten.linear.default: lambda shapes: shapes[0][-1],
    aten.matmul.default: lambda shapes: shapes[0][-1],
    aten.mm.default: lambda shapes: shapes[0][-1],
    aten.bmm.default: lambda shapes: shapes[0][-1],
    aten.addmm.default: lambda shapes: shapes[1][-1],
    aten.baddbmm.default: lambda shapes: shapes[1][-1],
    aten.conv1d.default: _of_convolution,
    aten.conv2d.default: _of_convolution,
    aten.conv3d.default: _of_convolution,
    aten.convolution.default: _of_convolution,
}
_ATTENTION = {aten.scaled_dot_product_attention.default}
