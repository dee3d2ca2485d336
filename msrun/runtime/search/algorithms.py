"""Ways to search: a linear program, propagation from what the user has configured, axis by axis, window by window."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from msrun.errors import MissingPackageError, StrategyError
from msrun.runtime.search.dynamic import Answers, solve_dynamic
from msrun.runtime.search.problem import Choice, Problem, Variable
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.rule import LabelSplit


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


def solve_recursive(problem: Problem, mesh: Mesh) -> Choice:
    """Return a plan of a mesh that is cut axis by axis."""
    neighbours = problem.neighbours()
    choice = [_nearest(variable.splits, ()) for variable in problem.variables]
    known: dict[tuple[object, ...], NDArray[np.bool_]] = {}
    """Splits that are open to variables that have the same ones."""
    for level in range(len(mesh.axes)):
        above = mesh.axes[:level]
        for index, variable in enumerate(problem.variables):
            present = _within(variable.splits[choice[index]], above)
            question = (id(variable.splits), level, present)
            if question not in known:
                known[question] = np.array([_continues(split, present, above, mesh) for split in variable.splits])
            open_splits = known[question].copy()
            open_splits[choice[index]] = True
            costs = variable.seconds.copy()
            for other, between in neighbours[index].items():
                costs += between[:, choice[other]]
            costs[~open_splits] = np.inf
            choice[index] = int(np.argmin(costs))
    return improve(problem, choice)


def _clean(split: LabelSplit) -> tuple[tuple[str, Axes], ...]:
    return tuple(sorted((label, axes) for label, axes in split.items() if axes))


def _within(split: LabelSplit, axes: Axes) -> tuple[tuple[str, Axes], ...]:
    """Return what of a split these axes do."""
    return _clean({label: tuple(axis for axis in own if axis in axes) for label, own in split.items()})


def _continues(split: LabelSplit, present: tuple[tuple[str, Axes], ...], above: Axes, mesh: Mesh) -> bool:
    """Return whether a split keeps what the axes above a level do, and adds the next axis alone; or all axes below as
    one, as the inner axes of a large mesh go together."""
    if _within(split, above) != present:
        return False
    rest = mesh.axes[len(above) :]
    is_next = _within(split, mesh.axes[: len(above) + 1]) == _clean(split)
    return is_next or any(own[-len(rest) :] == rest for own in split.values())


def _nearest(splits: list[LabelSplit], axes: Axes) -> int:
    """Return the split that uses these axes alone, or the first one: those that a user has fixed use others too."""
    return next((number for number, split in enumerate(splits) if _within(split, axes) == _clean(split)), 0)


WIDTH = 8
"""Operators that are decided at once."""
MOST_ROUNDS = 4
MOST_ENTRIES = 100_000


def improve(problem: Problem, choice: Sequence[int]) -> Choice:
    """Return a plan that no window of `WIDTH` operators makes cheaper, or that of the last round."""
    best, edges, answers = list(choice), _edges_of(problem), Answers()
    windows = [
        range(begin, min(begin + WIDTH, len(best))) for begin in range(0, max(1, len(best) - WIDTH // 2), WIDTH // 2)
    ]
    around = [{index for member in window for pair in edges[member] for index in pair} for window in windows]
    changed = set(range(len(best)))
    for _ in range(MOST_ROUNDS):
        before, changed = changed, set()
        for window, near in zip(windows, around, strict=True):
            if near.isdisjoint(before) and near.isdisjoint(changed):
                continue
            part = _part(problem, edges, window, best)
            found, own = solve_dynamic(part, MOST_ENTRIES, answers), [best[index] for index in window]
            if part.seconds(found) < part.seconds(own) * (1 - 1e-12):
                changed |= {index for index, old, new in zip(window, own, found, strict=True) if old != new}
                best[window.start : window.stop] = found
        if not changed:
            break
    return best


def _edges_of(problem: Problem) -> list[list[tuple[int, int]]]:
    """Return the edges of every variable."""
    found: list[list[tuple[int, int]]] = [[] for _ in problem.variables]
    for pair in problem.edges:
        for variable in pair:
            found[variable].append(pair)
    return found


def _part(
    problem: Problem, edges: Sequence[Sequence[tuple[int, int]]], window: range, choice: Sequence[int]
) -> Problem:
    """Return the problem of a window in which all other variables stay as they are."""
    part = Problem()
    for index in window:
        own = problem.variables[index]
        part.variables.append(Variable(own.nodes, own.splits, own.seconds.copy(), own.memory, own.is_fixed))
    for index in window:
        for i, j in edges[index]:
            other = j if i == index else i
            between = problem.edges[i, j] if i == index else problem.edges[i, j].T
            if other not in window:
                part.variables[index - window.start].seconds += between[:, choice[other]]
            elif other > index:
                part.add_edge(index - window.start, other - window.start, between)
    return part
