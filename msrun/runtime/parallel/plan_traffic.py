"""The traffic of one training step, put together for the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msrun.runtime.graph.collective_messages import CollectiveTraffic, Message, Totals
from msrun.runtime.graph.parameters import ParameterGroup
from msrun.runtime.graph.prediction import (
    collective_traffic,
    gather_messages,
    gradient_messages,
    local_values,
    nodes_with_gradient,
)
from msrun.runtime.graph.program import LocalProgram


@dataclass(frozen=True)
class StepTraffic:
    """Every message of a step on this rank."""

    operators: list[tuple[CollectiveTraffic, ...]]
    """For each operator, for one copy of the batch."""
    results: tuple[CollectiveTraffic, ...]
    groups: list[tuple[list[Message], list[Message]]]
    """For each fusion group of parameters: gathers, and sums of gradients."""
    totals: Totals | None
    notes: tuple[str, ...] = ()


def predict_traffic(program: LocalProgram, groups: Sequence[ParameterGroup], copies: int) -> StepTraffic:
    """Return the messages of a step of a program, told from its shapes.

    A program that cannot be walked without values has a note instead of totals: it trains all the same.
    """
    of_groups = [(gather_messages(group), gradient_messages(group)) for group in groups]
    try:
        values = local_values(program)
    except RuntimeError as error:  # an operator that needs values, of which only the run has any
        nothing: list[tuple[CollectiveTraffic, ...]] = [()] * len(program.operators)
        note = f"the traffic of a step is not told: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return StepTraffic(nothing, (), of_groups, None, (note,))
    reached = nodes_with_gradient(program, values)
    moved = [collective_traffic(nodes, program, values, reached) for nodes in program.collectives]
    messages = [m for of_one in moved for traffic in of_one for m in traffic.messages] * copies
    messages += [m for gathers, sums in of_groups for m in (*gathers, *sums)]
    return StepTraffic(moved[:-1], moved[-1], of_groups, Totals.of(messages))
