"""The traffic of one training step, put together for the plan."""

from __future__ import annotations

from dataclasses import dataclass

from msrun.runtime.graph.collective_messages import CollectiveTraffic, Message, Totals, forward_message
from msrun.runtime.graph.prediction import (
    LocalValues,
    collective_traffic,
    gather_messages,
    local_values,
    nodes_with_gradient,
    sum_messages,
)
from msrun.runtime.graph.program import LocalProgram
from msrun.runtime.parallel.compilation.compiled import CompiledCall


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
    totals: Totals | None
    notes: tuple[str, ...] = ()


def predict_traffic(compiled: CompiledCall, rank: int) -> StepTraffic:
    """Return the messages of a training step of a program, told from its shapes.

    A program that cannot be walked without values has a note instead of totals: it trains all the same.
    """
    parts = compiled.parts
    gathers = [gather_messages(group, parts.micro_batches) for group in compiled.groups]
    sums = [sum_messages(group, parts.micro_batches) for group in compiled.executor.gradient_groups]
    program = compiled.program
    try:
        values = local_values(program)
    except RuntimeError as error:  # an operator that needs values, of which only the run has any
        nothing: list[tuple[CollectiveTraffic, ...]] = [()] * len(program.operators)
        note = f"the traffic of a step is not told: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return StepTraffic(nothing, (), gathers, sums, None, (note,))
    trained = {node.name for node in nodes_with_gradient(program, values)}
    groups = compiled.executor.gradient_groups
    sums = [found if trained & {*group.placeholders} else [] for group, found in zip(groups, sums, strict=True)]
    moved = operator_traffic(program, values, rank)
    messages = [m for of_one in moved for traffic in of_one for m in traffic.messages]
    messages = (messages + _again(compiled, values, rank)) * parts.total
    messages += [m for of_group in (*gathers, *sums) for m in of_group]
    return StepTraffic(moved[:-1], moved[-1], gathers, sums, Totals.of(messages))


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
    return [message for message in found if message is not None]
