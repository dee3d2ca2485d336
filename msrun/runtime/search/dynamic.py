"""Dynamic programming: variables are eliminated one by one, each into a table over its neighbours, then unwound.

It is exact (Bertele and Brioschi, "Nonserial dynamic programming", 1972); MindSpore's operator, edge and star
eliminations are cases of it. Its time is linear in the operators of a network whose branches join again soon. Where a
table would grow beyond `most_entries`, its widest neighbour keeps its cheapest splits alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from msrun.runtime.search.problem import Choice, Costs, Problem

MOST_ENTRIES = 2_000_000


@dataclass
class _Table:
    """Costs over some variables."""

    variables: tuple[int, ...]
    costs: Costs


@dataclass
class _Eliminated:
    scope: tuple[int, ...]
    """Its neighbours, and last itself."""
    allowed: tuple[np.ndarray, ...]
    """Splits of each of the scope that the table has."""
    best: np.ndarray
    """[splits of the neighbours] -> the best split of the variable."""


def solve_dynamic(problem: Problem, most_entries: int = MOST_ENTRIES) -> Choice:
    """Return the cheapest plan; exactly the cheapest one while no table has more than `most_entries` entries."""
    count = len(problem.variables)
    allowed = [np.arange(len(variable.splits)) for variable in problem.variables]
    tables = [_Table((i,), variable.seconds) for i, variable in enumerate(problem.variables)]
    tables += [_Table(pair, costs) for pair, costs in problem.edges.items()]
    of_variable: list[list[_Table]] = [[] for _ in range(count)]
    for table in tables:
        for variable in table.variables:
            of_variable[variable].append(table)
    adjacent: list[set[int]] = [set() for _ in range(count)]
    for i, j in problem.edges:
        adjacent[i].add(j)
        adjacent[j].add(i)
    waiting = _Order(adjacent)
    eliminated: list[_Eliminated] = []
    for _ in range(count):
        index = waiting.take()
        neighbours = tuple(sorted(adjacent[index]))
        _keep_cheapest(problem, allowed, (index, *neighbours), most_entries)
        scope = (*neighbours, index)
        total = np.zeros([len(allowed[each]) for each in scope])
        for table in of_variable[index]:
            total = total + _aligned(table, scope, allowed)
        eliminated.append(_Eliminated(scope, tuple(allowed[each] for each in scope), total.argmin(axis=-1)))
        for table in of_variable[index]:
            for other in table.variables:
                if other != index:
                    of_variable[other] = [each for each in of_variable[other] if each is not table]
        if neighbours:
            full = np.full([len(problem.variables[each].splits) for each in neighbours], np.inf)
            full[np.ix_(*(allowed[each] for each in neighbours))] = total.min(axis=-1)
            made = _Table(neighbours, full)
            for other in neighbours:
                of_variable[other].append(made)
        for other in neighbours:
            adjacent[other].discard(index)
            adjacent[other] |= set(neighbours) - {other}
            waiting.put(other)
    return _unwind(eliminated, count)


class _Order:
    """Variables with the fewest neighbours first; of those the earliest."""

    def __init__(self, adjacent: list[set[int]]) -> None:
        self._adjacent = adjacent
        self._buckets: dict[int, dict[int, None]] = {}
        self._degree: dict[int, int] = {}
        for index in range(len(adjacent)):
            self.put(index)

    def put(self, index: int) -> None:
        """Sort a variable in again."""
        if index in self._degree:
            del self._buckets[self._degree[index]][index]
        self._degree[index] = len(self._adjacent[index])
        self._buckets.setdefault(self._degree[index], {})[index] = None

    def take(self) -> int:
        """Return the next variable and take it out."""
        degree = min(degree for degree, bucket in self._buckets.items() if bucket)
        index = next(iter(self._buckets[degree]))
        del self._buckets[degree][index]
        del self._degree[index]
        return index


def _keep_cheapest(problem: Problem, allowed: list[np.ndarray], scope: tuple[int, ...], most: int) -> None:
    """Leave the variables of a table so few splits that it stays small."""
    while math.prod(len(allowed[each]) for each in scope) > most:
        widest = max(scope, key=lambda each: len(allowed[each]))
        own = allowed[widest]
        order = np.argsort(problem.variables[widest].seconds[own], kind="stable")
        allowed[widest] = np.sort(own[order[: max(1, len(own) // 2)]])


def _aligned(table: _Table, scope: tuple[int, ...], allowed: list[np.ndarray]) -> Costs:
    """Return a table's costs over the allowed splits, with one axis for each variable of the scope."""
    costs = table.costs[np.ix_(*(allowed[each] for each in table.variables))]
    order = sorted(range(len(table.variables)), key=lambda place: scope.index(table.variables[place]))
    costs = costs.transpose(order)
    return costs.reshape([len(allowed[each]) if each in table.variables else 1 for each in scope])


def _unwind(eliminated: list[_Eliminated], count: int) -> Choice:
    choice = [0] * count
    for step in reversed(eliminated):
        *others, own = zip(step.scope, step.allowed, strict=True)
        place = tuple(int(np.searchsorted(allowed, choice[each])) for each, allowed in others)
        choice[own[0]] = int(own[1][int(step.best[place])])
    return choice
