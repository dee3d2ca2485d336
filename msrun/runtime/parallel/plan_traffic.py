"""The traffic of one training step, told from the local program and its groups of parameters without running them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from torch import fx

from msrun.runtime.execute.gradients import GradientGroup
from msrun.runtime.execute.parameters import ParameterGroup
from msrun.runtime.parallel.compilation.compiled import CompiledCall, ProgramCall
from msrun.runtime.partition.collective_messages import (
    CollectiveTraffic,
    Message,
    Totals,
    backward_message,
    forward_message,
    gathers_of_parameter,
    sums_of_gradient,
)
from msrun.runtime.partition.local_values import (
    LocalValue,
    LocalValues,
    gradient_reaches,
    nodes_with_gradient,
)
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.operators.rule import collective_of


@dataclass(frozen=True)
class StepTraffic:
    """Every message of a step on this rank."""

    operators: list[tuple[CollectiveTraffic, ...]]
    """For each operator, for one part of the batch."""
    results: tuple[CollectiveTraffic, ...]
    gathers: list[list[Message]]
    """For each fusion group of parameters."""
    sums: list[list[Message]]
    """For each group of gradients."""
    borders: list[tuple[list[fx.Node], tuple[CollectiveTraffic, ...]]]
    """Copies between host and device in each program of this rank, and what they move, for one part of the batch."""
    totals: Totals | None
    notes: tuple[str, ...] = ()


def predict_traffic(call: ProgramCall, rank: int) -> StepTraffic:
    """Return the messages of a training step of a program, told from its shapes: of a pipeline those of this rank.

    A program that cannot be walked without values has a note instead of totals: it trains all the same.
    """
    program, parts = call.program, call.parts
    own, groups = list(call.own.values()), call.gradient_groups
    gathers = [gather_messages(group, parts.micro_batches) for group in call.groups]
    sums = [sum_messages(group, parts.micro_batches) for group in groups]
    try:
        values = call.local_values()
    except RuntimeError as error:  # an operator that needs values, of which only the run has any
        nothing: list[tuple[CollectiveTraffic, ...]] = [()] * len(program.operators)
        note = f"the traffic of a step is not told: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return StepTraffic(nothing, (), gathers, sums, [], None, (note,))
    reached = nodes_with_gradient(program, values)
    trained = {node.name for node in reached}
    sums = [found if trained & {*group.placeholders} else [] for group, found in zip(groups, sums, strict=True)]
    moved = operator_traffic(program, values, rank)
    borders = [_borders(each, values, rank) for each in call.programs_with_ends()]
    here = {node.name for compiled in own for node in compiled.program.graph.nodes}
    nodes = [node for of_one in program.collectives for node in of_one]
    all_moved = [traffic for of_one in moved for traffic in of_one]
    messages = [
        m for node, traffic in zip(nodes, all_moved, strict=True) if node.name in here for m in traffic.messages
    ]
    messages += [m for _, of_one in borders for traffic in of_one for m in traffic.messages]
    for compiled in own:
        messages += _again(compiled, values, rank)
    messages += call.messages_of_part()
    messages *= parts.total
    messages += [m for of_group in (*gathers, *sums) for m in of_group] + call.messages_of_step()
    return StepTraffic(moved[:-1], moved[-1], gathers, sums, borders, Totals.of(messages))


def _borders(
    program_with_ends: tuple[LocalProgram, list[fx.Node] | None], known: LocalValues, rank: int
) -> tuple[list[fx.Node], tuple[CollectiveTraffic, ...]]:
    """Return the copies between host and device in a program, and what they move."""
    program, ends = program_with_ends
    if ends is None:
        reached = nodes_with_gradient(program, known)
        return program.borders, collective_traffic(program.borders, program, known, reached, rank)
    by_name = {node.name: value for node, value in known.items()}
    values: dict[fx.Node, LocalValue] = {}
    for node in program.graph.nodes:
        value = values.get(node.all_input_nodes[0]) if node in program.borders else by_name.get(node.name)
        if value is not None:
            values[node] = value
    reached = gradient_reaches(ends, values)
    return program.borders, collective_traffic(program.borders, program, values, reached, rank)


def operator_traffic(program: LocalProgram, values: LocalValues, rank: int) -> list[tuple[CollectiveTraffic, ...]]:
    """Return what the collectives of every operator, and last of the results, move for one part of the batch."""
    reached = nodes_with_gradient(program, values)
    return [collective_traffic(nodes, program, values, reached, rank) for nodes in program.collectives]


def _again(compiled: CompiledCall, values: LocalValues, rank: int) -> list[Message]:
    """Return what recomputed modules move a second time."""
    by_name = {node.name: value for node, value in values.items()}
    found: list[Message | None] = []
    for replay in compiled.executor.replays:
        for crossings in replay.crossings.values():
            for crossing in crossings:
                value = by_name[crossing.source]
                mesh = compiled.program.mesh
                found.append(forward_message(crossing.collective, value.shape, value.dtype, mesh, rank))
        again = [compiled.executor.segments[index].module.graph for index in replay.segments]
        for node in [node for graph in again for node in graph.nodes]:
            if (collective := collective_of(node)) is not None:  # which the operator runs itself
                value = by_name[node.args[0].name]
                found.append(forward_message(collective, value.shape, value.dtype, compiled.program.mesh, rank))
    return [message for message in found if message is not None]


def collective_traffic(
    nodes: Iterable[fx.Node], program: LocalProgram, values: LocalValues, with_gradient: set[fx.Node], rank: int
) -> tuple[CollectiveTraffic, ...]:
    """Return what the collectives at these nodes move for one copy of the batch."""
    found = []
    for node in nodes:
        collective, value = cast(Collective, collective_of(node)), values[cast(fx.Node, node.args[0])]
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
    size = item * sum(member.sent_numel for member in group.members)
    times = 2 * micro_batches if group.regathers else 1
    return [gathers_of_parameter(size, group.shard_axes, group.mesh)] * times


def sum_messages(group: GradientGroup, micro_batches: int) -> list[Message]:
    """Return what summing the gradients of one group moves in a step."""
    if not group.members[0].parameter.requires_grad or group.may_be_rows:
        return []
    item = (group.sum_dtype or group.members[0].parameter.dtype).itemsize
    size = item * sum(member.sent_numel for member in group.members)
    times = micro_batches if group.shard_axes and group.scatters_each else 1
    return [message for message, _ in sums_of_gradient(size, group.shard_axes, group.partial_axes, group.mesh)] * times
