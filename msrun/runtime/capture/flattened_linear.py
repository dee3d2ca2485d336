"""Linear layers that a network calls on flattened rows: they work on the rows as they were.

nn.MultiheadAttention joins (length, batch) into one dimension around its output layer. A cut batch, which is the inner
part of that dimension, could not be kept there and would be gathered; `aten.linear` takes any leading dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import fx

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def unflatten_linears(graph: fx.Graph) -> None:
    """Take out reshapes to two dimensions before a linear layer that are undone behind it."""
    for node in list(graph.nodes):
        if node.target is not aten.linear.default:
            continue
        before, behind = node.args[0], list(node.users)
        shape = _common_shape(behind)
        if before.target not in _RESHAPES or before.meta["val"].dim() != 2 or shape is None or len(shape) < 3:
            continue
        width = before.meta["val"].shape[-1]
        if shape[-1] != node.meta["val"].shape[-1] or math.prod(shape[:-1]) != node.meta["val"].shape[0]:
            continue
        with graph.inserting_before(node):
            leading = graph.call_function(aten.reshape.default, (before.args[0], [*shape[:-1], width]))
        leading.meta = {**before.meta, "val": before.meta["val"].reshape(*shape[:-1], width)}
        node.args = (leading, *node.args[1:])
        node.meta["val"] = behind[0].meta["val"]
        for reader in behind:
            reader.replace_all_uses_with(node)
            graph.erase_node(reader)
        if not before.users:
            graph.erase_node(before)


def _common_shape(nodes: list[fx.Node]) -> list[int] | None:
    """Return the shape that all these nodes reshape to, if that is all they do."""
    shapes = [list(node.meta["val"].shape) if node.target in _RESHAPES else None for node in nodes]
    return shapes[0] if shapes and all(shape == shapes[0] for shape in shapes) else None
