"""The exact search: a linear program over binary choices, with memory as a constraint, by HiGHS (scipy's `milp`).

It is the oracle of the other searches and serves small graphs. The formulation is Alpa's (Zheng et al., OSDI 2022,
section 4.2): one binary number for each split, one number for each pair of splits on an edge.
"""

from __future__ import annotations

import numpy as np

from msrun.errors import MissingPackageError, StrategyError
from msrun.runtime.search.problem import Choice, Problem


def solve_exactly(problem: Problem, memory_limit: float | None = None) -> Choice:
    """Return the cheapest plan whose bytes, as choices tell them, stay within a limit.

    Raises:
        MissingPackageError: scipy is not installed.
        StrategyError: no plan stays within the limit.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError:
        raise MissingPackageError('the exact search needs scipy: pip install "msrun[search]"') from None
    sizes = [len(variable.splits) for variable in problem.variables]
    begins = np.concatenate([[0], np.cumsum(sizes)])
    costs = [variable.seconds for variable in problem.variables]
    rows: list[tuple[int, int, float]] = []
    lower, upper = [], []
    for index, size in enumerate(sizes):
        rows += [(index, int(begins[index]) + number, 1.0) for number in range(size)]
        lower.append(1.0)
        upper.append(1.0)
    place = int(begins[-1])
    for (i, j), between in problem.edges.items():
        costs.append(between.ravel())
        for first in range(sizes[i]):
            rows += [(len(lower), place + first * sizes[j] + second, 1.0) for second in range(sizes[j])]
            rows.append((len(lower), int(begins[i]) + first, -1.0))
            lower.append(0.0)
            upper.append(0.0)
        for second in range(sizes[j]):
            rows += [(len(lower), place + first * sizes[j] + second, 1.0) for first in range(sizes[i])]
            rows.append((len(lower), int(begins[j]) + second, -1.0))
            lower.append(0.0)
            upper.append(0.0)
        place += between.size
    if memory_limit is not None:
        bytes_of = np.concatenate([variable.memory for variable in problem.variables])
        rows += [(len(lower), number, float(size)) for number, size in enumerate(bytes_of)]
        lower.append(-np.inf)
        upper.append(memory_limit)
    at, columns, values = zip(*rows, strict=True)
    matrix = coo_array((values, (at, columns)), shape=(len(lower), place)).tocsr()
    is_choice = np.arange(place) < begins[-1]
    seconds = np.concatenate(costs)
    unit = float(seconds[seconds > 0].mean()) if (seconds > 0).any() else 1.0  # seconds are small for its tolerances
    found = milp(
        seconds / unit,
        integrality=is_choice.astype(int),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, lower, upper),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise StrategyError(f"no plan of these operators stays within {memory_limit} bytes: {found.message}")
    return [int(np.argmax(found.x[begins[index] : begins[index + 1]])) for index in range(len(sizes))]
