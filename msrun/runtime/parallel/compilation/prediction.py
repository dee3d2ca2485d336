"""Prediction: every message of one training step, told from the local program without running it.

The program is walked once on fake tensors of this rank's shapes: that gives the shape, type and need for a gradient of
every value. Gradients are taken to enter at the loss: the first result that is a floating-point scalar, or else every
floating-point result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from torch import fx

from msrun.runtime.execute.gradients import GradientGroup
from msrun.runtime.execute.parameters import ParameterGroup
from msrun.runtime.partition.collective_messages import (
    CollectiveTraffic,
    Message,
    backward_message,
    forward_message,
    gathers_of_parameter,
    sums_of_gradient,
)
from msrun.runtime.partition.local_values import LocalValue, gradient_reaches, infer_local_values
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.collective import Collective

LocalValues = Mapping[fx.Node, LocalValue]


def local_values(program: LocalProgram) -> LocalValues:
    """Return what every tensor of a training step is."""
    trainable = {name: use.node.meta["val"].requires_grad for name, use in program.parameters.items()}
    return infer_local_values(program, trainable=trainable, differentiable_inputs=program.differentiable_inputs)


def nodes_with_gradient(program: LocalProgram, values: LocalValues) -> set[fx.Node]:
    """Return the values that a gradient comes back to in a training step."""
    results = [node for node in program.outputs if isinstance(node, fx.Node) and values[node].requires_grad]
    return gradient_reaches([node for node in results if not values[node].shape][:1] or results, values)


def collective_traffic(
    nodes: Iterable[fx.Node], program: LocalProgram, values: LocalValues, with_gradient: set[fx.Node], rank: int
) -> tuple[CollectiveTraffic, ...]:
    """Return what the collectives at these nodes move for one copy of the batch."""
    found = []
    for node in nodes:
        collective, value = cast(Collective, node.kwargs["collective"]), values[cast(fx.Node, node.args[0])]
        back = (
            backward_message(collective, value.shape, value.dtype, program.mesh, rank)
            if node in with_gradient
            else None
        )
        forward = forward_message(collective, value.shape, value.dtype, program.mesh, rank)
        found.append(CollectiveTraffic(str(collective), forward, back))
    return tuple(found)


def gather_messages(group: ParameterGroup, micro_batches: int) -> list[Message]:
    """Return what gathering the parameters of one fusion group moves in a step."""
    if not group.shard_axes:
        return []
    item = (group.dtype or group.members[0].parameter.dtype).itemsize
    size = item * sum(member.part.numel() for member in group.members)
    times = 2 * micro_batches if group.regathers else 1
    return [gathers_of_parameter(size, group.shard_axes, group.mesh)] * times


def sum_messages(group: GradientGroup, micro_batches: int) -> list[Message]:
    """Return what summing the gradients of one group moves in a step."""
    if not group.members[0].parameter.requires_grad or group.may_be_rows:
        return []
    item = (group.sum_dtype or group.members[0].parameter.dtype).itemsize
    size = item * sum(member.part.numel() for member in group.members)
    times = micro_batches if group.shard_axes and group.scatters_each else 1
    return [message for message, _ in sums_of_gradient(size, group.shard_axes, group.partial_axes, group.mesh)] * times
