"""Prediction: every message of one training step, told from the local program without running it.

The program is walked once on fake tensors of this rank's shapes: that gives the shape, type and need for a gradient of
every value. Gradients are taken to enter at the loss: the first result that is a floating-point scalar, or else every
floating-point result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from msrun.runtime.graph.collective_messages import (
    CollectiveTraffic,
    Message,
    backward_message,
    forward_message,
    result_shape,
)
from msrun.runtime.graph.collectives import Collective
from msrun.runtime.graph.operators.rule import apply_collective
from msrun.runtime.graph.parameters import ParameterGroup
from msrun.runtime.graph.program import LocalProgram

LocalValues = Mapping[fx.Node, Any]


def local_values(program: LocalProgram) -> LocalValues:
    """Return a fake tensor for every value of the local program."""
    layouts = dict(zip(program.inputs, program.input_layouts, strict=True))
    layouts |= {use.node: use.layout for use in program.parameters.values()}
    trained = {use.node for use in program.parameters.values() if use.node.meta["val"].requires_grad}
    trained |= {program.inputs[index] for index in program.differentiable_inputs}
    values: dict[fx.Node, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        for node in program.graph.find_nodes(op="placeholder"):
            whole, layout = node.meta["val"], layouts.get(node)
            shape = layout.local_shape(program.mesh, tuple(whole.shape)) if layout else tuple(whole.shape)
            values[node] = torch.empty(shape, dtype=whole.dtype, device=whole.device).requires_grad_(node in trained)
        return _walk(program, values)


def _walk(program: LocalProgram, values: dict[fx.Node, Any]) -> LocalValues:
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.target is not apply_collective:
            values[node] = node.target(*args, **kwargs)
            continue
        (value,) = args
        shape = result_shape(kwargs["collective"], value.shape, program.mesh)
        values[node] = value.detach().new_empty(shape).requires_grad_(value.requires_grad)
    return values


def nodes_with_gradient(program: LocalProgram, values: LocalValues) -> set[fx.Node]:
    """Return the values that a gradient comes back to in a training step."""
    results = [node for node in program.outputs if isinstance(node, fx.Node) and values[node].requires_grad]
    losses = [node for node in results if values[node].dim() == 0][:1] or results
    reached: set[fx.Node] = set()
    waiting = list(losses)
    while waiting:
        node = waiting.pop()
        if node in reached or not _needs_grad(values[node]):
            continue
        reached.add(node)
        waiting += node.all_input_nodes
    return reached


def _needs_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, list | tuple) and any(_needs_grad(part) for part in value)


def collective_traffic(
    nodes: Iterable[fx.Node], program: LocalProgram, values: LocalValues, with_gradient: set[fx.Node]
) -> tuple[CollectiveTraffic, ...]:
    """Return what the collectives at these nodes move for one copy of the batch."""
    found = []
    for node in nodes:
        collective, value = cast(Collective, node.kwargs["collective"]), values[cast(fx.Node, node.args[0])]
        back = backward_message(collective, value.shape, value.dtype, program.mesh) if node in with_gradient else None
        forward = forward_message(collective, value.shape, value.dtype, program.mesh)
        found.append(CollectiveTraffic(str(collective), forward, back))
    return tuple(found)


def gather_messages(group: ParameterGroup) -> list[Message]:
    """Return what gathering the parameters of one fusion group moves in a step."""
    if not group.shard_axes:
        return []
    message = Message("all_gather", group.local_bytes(), group.mesh.extent(group.shard_axes))
    return [message] * (1 + group.regathers)


def gradient_messages(group: ParameterGroup) -> list[Message]:
    """Return what summing the gradients of one fusion group moves in a step."""
    mesh, size = group.mesh, group.local_bytes()
    summed = tuple(axis for axis in group.shard_axes if axis in group.partial_axes)
    rest = tuple(axis for axis in group.partial_axes if axis not in group.shard_axes)
    same = tuple(axis for axis in group.shard_axes if axis not in group.partial_axes)
    if group.shard_axes != same + summed:  # stored for another program: everything is summed, then cut
        return [Message("all_reduce", size * mesh.extent(group.shard_axes), mesh.extent(summed + rest))]
    found = [Message("reduce_scatter", size * mesh.extent(summed), mesh.extent(summed))] if summed else []
    return [*found, Message("all_reduce", size, mesh.extent(rest))] if rest else found
