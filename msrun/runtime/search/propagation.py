"""Sharding propagation: from the operators that the user has configured outwards, each next operator takes the split
that is cheapest beside its decided neighbours (MindSpore's `sharding_propagation`). Without any configured operator it
begins where the batch comes in. Afterwards the plan is improved window by window.
"""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np

from msrun.runtime.search.problem import Choice, Problem
from msrun.runtime.search.windows import improve


def solve_propagation(problem: Problem) -> Choice:
    """Return the plan that spreads from the configured operators."""
    neighbours = problem.neighbours()
    choice: dict[int, int] = {}
    configured = [index for index, variable in enumerate(problem.variables) if variable.is_fixed]
    for begin in itertools.chain(configured, range(len(problem.variables))):  # the graph may fall apart
        waiting = deque([begin])
        while waiting:
            index = waiting.popleft()
            if index in choice:
                continue
            costs = problem.variables[index].seconds.copy()
            for other, between in neighbours[index].items():
                if other in choice:
                    costs += between[:, choice[other]]
            choice[index] = int(np.argmin(costs))
            waiting.extend(other for other in neighbours[index] if other not in choice)
    return improve(problem, [choice[index] for index in range(len(problem.variables))])
