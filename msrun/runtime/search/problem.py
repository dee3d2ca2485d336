"""Problem: operators with priced choices, and what every pair of choices of neighbours costs.

The cost of a plan is the sum of the seconds of its choices and of its edges. It is linear, so that it can be solved
exactly; `price` tells the whole truth of a plan afterwards, with redistributions that several readers share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from msrun.runtime.sharding.operators.rule import LabelSplit

Costs = NDArray[np.float64]
Choice = list[int]
"""For each variable the number of its chosen split."""


@dataclass
class Variable:
    """One operator, or several that read the same values and are cut alike, such as query, key and value."""

    nodes: list[str]
    """Captured operators."""
    splits: list[LabelSplit]
    seconds: Costs
    """[splits]: compute, messages of its own, gradients of its parameters, and of what only follows it."""
    memory: Costs
    """[splits]: bytes of its parameters with gradients and optimizer state, and of what it keeps."""
    is_fixed: bool = False
    """Its split is the user's."""


@dataclass
class Problem:
    """What a search solves."""

    variables: list[Variable] = field(default_factory=list)
    edges: dict[tuple[int, int], Costs] = field(default_factory=dict)
    """(variable, later variable) -> [splits, splits]: seconds to bring values from the one to the other."""
    constant: float = 0.0

    def add_edge(self, first: int, second: int, seconds: Costs) -> None:
        """Add what an edge costs; [splits of first, splits of second]."""
        key, costs = ((first, second), seconds) if first < second else ((second, first), seconds.T)
        self.edges[key] = self.edges[key] + costs if key in self.edges else costs

    def seconds(self, choice: Sequence[int]) -> float:
        """Return the cost of a plan."""
        own = sum(float(v.seconds[number]) for v, number in zip(self.variables, choice, strict=True))
        between = sum(float(costs[choice[i], choice[j]]) for (i, j), costs in self.edges.items())
        return self.constant + own + between

    def memory(self, choice: Sequence[int]) -> float:
        """Return the bytes of a plan, as far as choices tell them one by one."""
        return sum(float(v.memory[number]) for v, number in zip(self.variables, choice, strict=True))

    def weighing_memory(self, seconds_per_byte: float) -> Problem:
        """Return the problem in which memory costs time too."""
        variables = [
            Variable(v.nodes, v.splits, v.seconds + seconds_per_byte * v.memory, v.memory, v.is_fixed)
            for v in self.variables
        ]
        return Problem(variables, self.edges, self.constant)

    def neighbours(self) -> list[dict[int, Costs]]:
        """Return for every variable its neighbours, each with [own splits, splits of the neighbour]."""
        found: list[dict[int, Costs]] = [{} for _ in self.variables]
        for (i, j), costs in self.edges.items():
            found[i][j] = costs
            found[j][i] = costs.T
        return found

    def splits(self, choice: Sequence[int]) -> Mapping[str, LabelSplit]:
        """Return captured operator -> its split."""
        return {
            node: variable.splits[number]
            for variable, number in zip(self.variables, choice, strict=True)
            for node in variable.nodes
        }
