"""Gradient modes: what a network does under `torch.no_grad()` becomes part of the one graph.

torch.export puts it into a graph of its own, inside one operator; here its operators stand in the graph again and read
their inputs without gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import fx

from msrun.errors import CaptureError

_GRADIENT_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_gradient_modes(module: fx.GraphModule, buffers: Collection[str]) -> None:
    """Put the operators of every `no_grad` and `enable_grad` region into the graph of `module`.

    Args:
        buffers: placeholder names of the network's buffers: they have no gradient, and a region may write into them.

    Raises:
        CaptureError: a region of another kind, such as autocast or control flow.
    """
    for node in list(module.graph.nodes):
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            if node.target is not _GRADIENT_MODE:
                raise CaptureError(
                    f"the network uses {node.target.name()}, whose operators a captured graph does not show: take it "
                    'out of the network, or use parallel_mode="data_parallel", which needs no capture'
                )
            _inline(module, node, buffers)


def _inline(module: fx.GraphModule, node: fx.Node, buffers: Collection[str]) -> None:
    is_enabled, body, *given = cast("list[Any]", node.args)
    region = getattr(module, str(body.target))
    own_buffers = [p.name for p, n in zip(_placeholders(region), given, strict=True) if _is_named(n, buffers)]
    inline_gradient_modes(region, own_buffers)
    graph = module.graph
    with graph.inserting_before(node):
        if not is_enabled:
            given = [n if _is_named(n, buffers) else _detached(graph, n) for n in given]
        copies = dict(zip(_placeholders(region), given, strict=True))
        for inner in region.graph.nodes:
            if inner.op == "call_function":
                copies[inner] = graph.node_copy(inner, lambda n: copies[n])
    (results,) = cast("Any", next(inner for inner in region.graph.nodes if inner.op == "output").args)
    for reader in list(node.users):
        assert reader.target is operator.getitem
        reader.replace_all_uses_with(copies[results[reader.args[1]]])
        graph.erase_node(reader)
    graph.erase_node(node)
    graph.erase_node(body)


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _is_named(node: object, names: Collection[str]) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and node.name in names


def _detached(graph: fx.Graph, node: Any) -> Any:
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return node
    detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached
