"""How a problem is solved: by dynamic programming, or as a linear program.

Dynamic programming: variables are eliminated one by one, each into a table over its neighbours, then unwound.

It is exact (Bertele and Brioschi, "Nonserial dynamic programming", 1972); MindSpore's operator, edge and star
eliminations are cases of it. Before and between eliminations splits go that another split of the same variable beats
whatever the neighbours choose (Goldstein, "Efficient rotamer elimination", 1994), which keeps tables small. Equal
questions are answered once, as the layers of a stack ask them, so that time is linear in the operators of a network
whose branches join again soon. Where a table would still grow beyond `most_entries`, its widest variable keeps its
cheapest splits alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from msrun.errors import MissingPackageError, StrategyError
from msrun.runtime.search.problem import Choice, Costs, Problem

MOST_ENTRIES = 2_000_000
MOST_COMPARED = 4_000_000
"""Entries of a table times splits up to which splits are compared over it."""
Numbers = NDArray[np.intp]
Scope = tuple[int, ...]
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Table:
    """Costs over some variables. Tables of one number are equal."""

    number: int
    costs: Costs


@dataclass(frozen=True)
class _Eliminated:
    scope: Scope
    """Its neighbours, and last itself."""
    open: tuple[Numbers, ...]
    """Splits of each of the scope that the table has."""
    best: Numbers
    """[splits of the neighbours] -> the best split of the variable."""


class Answers:
    """What was found out about tables, for problems that have tables in common."""

    def __init__(self) -> None:
        self._known: dict[Hashable, object] = {}
        self._numbers = 0

    @property
    def count(self) -> int:
        """How many tables were made."""
        return self._numbers

    def once(self, question: Hashable, answer: Callable[[], _T]) -> _T:
        """Return the answer to a question; answer it if it is asked for the first time."""
        if question not in self._known:
            self._known[question] = answer()
        return self._known[question]  # type: ignore[return-value]

    def table(self, costs: Costs) -> _Table:
        """Return a new table."""
        self._numbers += 1
        return _Table(self._numbers, np.ascontiguousarray(costs))


def solve_dynamic(problem: Problem, most_entries: int = MOST_ENTRIES, answers: Answers | None = None) -> Choice:
    """Return the cheapest plan; exactly the cheapest one while no table has more than `most_entries` entries."""
    return _Elimination(problem, most_entries, answers or Answers()).run()


class _Elimination:
    def __init__(self, problem: Problem, most_entries: int, answers: Answers) -> None:
        count = len(problem.variables)
        self._most = most_entries
        self._open: list[Numbers] = [np.arange(len(variable.splits)) for variable in problem.variables]
        """Splits of every variable that may still be the best."""
        self._tables: dict[Scope, _Table] = {}
        self._scopes: list[dict[Scope, None]] = [{} for _ in range(count)]
        """For every variable the tables that it is in."""
        self._adjacent: list[set[int]] = [set() for _ in range(count)]
        self._once = answers.once
        self._table = answers.table
        for index, variable in enumerate(problem.variables):
            self._add((index,), self._given(variable.seconds))
        for pair, costs in problem.edges.items():
            self._add(pair, self._given(costs))
            self._adjacent[pair[0]].add(pair[1])
            self._adjacent[pair[1]].add(pair[0])

    def run(self) -> Choice:
        """Eliminate every variable, smallest tables first, and unwind."""
        count = len(self._open)
        self._drop_beaten(range(count))
        entries = [self._entries(index) for index in range(count)]
        waiting = [(size, index) for index, size in enumerate(entries)]
        heapq.heapify(waiting)
        eliminated: list[_Eliminated] = []
        while waiting:
            size, index = heapq.heappop(waiting)
            if size != entries[index]:
                continue  # it stands further on again
            entries[index] = 0
            neighbours = self._adjacent[index]
            eliminated.append(self._eliminate(index))
            for other in sorted(neighbours.union(*(self._adjacent[each] for each in neighbours))):
                if entries[other] not in (0, now := self._entries(other)):
                    entries[other] = now
                    heapq.heappush(waiting, (now, other))
        return _unwind(eliminated, count)

    # -- tables -------------------------------------------------------------------------------------------------

    def _given(self, costs: Costs) -> _Table:
        return self._once(("given", costs.shape, costs.tobytes()), lambda: self._table(costs))

    def _add(self, scope: Scope, table: _Table) -> None:
        """Add costs over variables to what is known of them."""
        present = self._tables.get(scope)
        if present is not None:
            added = table
            pair = ("sum", *sorted((present.number, added.number)))
            table = self._once(pair, lambda: self._table(present.costs + added.costs))
        self._tables[scope] = table
        for index in scope:
            self._scopes[index][scope] = None

    def _entries(self, index: int) -> int:
        """Return how large the table is from which a variable is eliminated."""
        return math.prod(len(self._open[each]) for each in (index, *self._adjacent[index]))

    def _eliminate(self, index: int) -> _Eliminated:
        neighbours = tuple(sorted(self._adjacent[index]))
        scope = (*neighbours, index)
        while math.prod(len(self._open[each]) for each in scope) > self._most:
            widest = max(scope, key=lambda each: len(self._open[each]))
            order = np.argsort(self._tables[widest,].costs, kind="stable")
            self._keep(widest, np.sort(order[: len(order) // 2]))
        held = sorted(self._scopes[index])
        places = [(self._tables[each], tuple(map(scope.index, each))) for each in held]
        sizes = [len(self._open[each]) for each in scope]
        question = ("without", *((table.number, place) for table, place in places))
        made, best = self._once(question, lambda: self._without_last(places, sizes))
        found = _Eliminated(scope, tuple(self._open[each] for each in scope), best)
        for each in held:
            del self._tables[each]
            for other in each:
                del self._scopes[other][each]
        for other in neighbours:
            self._adjacent[other] |= set(neighbours) - {other}
            self._adjacent[other].discard(index)
        if neighbours:
            self._add(neighbours, made)
            self._drop_beaten(neighbours)
        return found

    def _without_last(self, places: list[tuple[_Table, tuple[int, ...]]], sizes: list[int]) -> tuple[_Table, Numbers]:
        """Return the sum of tables with the best of its last dimension, and which that is."""
        total = np.zeros(sizes)
        for table, place in places:
            order = sorted(range(len(place)), key=place.__getitem__)
            shape = [size if dim in place else 1 for dim, size in enumerate(sizes)]
            total = total + table.costs.transpose(order).reshape(shape)
        return self._table(total.min(axis=-1)), total.argmin(axis=-1)

    # -- splits that others beat --------------------------------------------------------------------------------

    def _drop_beaten(self, indexes: Iterable[int]) -> None:
        """Drop splits of these variables, and of neighbours of those that have lost some, until all may be the best."""
        waiting = sorted(indexes)
        while waiting:
            changed = [index for index in waiting if self._keep(index, self._unbeaten(index))]
            waiting = sorted(set().union(*(self._adjacent[index] for index in changed)))

    def _unbeaten(self, index: int) -> Numbers:
        """Return the places of the splits that no other one beats; of equal ones the first."""
        tables = [(self._tables[scope], scope.index(index)) for scope in sorted(self._scopes[index])]
        count = len(self._open[index])
        if count == 1 or any(table.costs.size * count > MOST_COMPARED for table, _ in tables):
            return np.arange(count)

        def answer() -> Numbers:
            behind = sum(self._least_behind(table, dim) for table, dim in tables)
            is_earlier = np.arange(count)[None, :] < np.arange(count)[:, None]
            return np.flatnonzero(~((behind > 0) | ((behind == 0) & is_earlier)).any(axis=1))

        return self._once(("unbeaten", *((table.number, dim) for table, dim in tables)), answer)

    def _least_behind(self, table: _Table, dim: int) -> Costs:
        """Return by how much each split is dearer than each other one, at the least; [split, other split]."""

        def answer() -> Costs:
            rows = np.moveaxis(table.costs, dim, 0).reshape(table.costs.shape[dim], -1)
            return (rows[:, None, :] - rows[None, :, :]).min(axis=-1)

        return self._once(("behind", table.number, dim), answer)

    def _keep(self, index: int, kept: Numbers) -> bool:
        """Leave a variable the splits at these places; returns whether it has lost some."""
        if len(kept) == len(self._open[index]):
            return False
        self._open[index] = self._open[index][kept]
        for scope in self._scopes[index]:
            self._tables[scope] = self._part(self._tables[scope], scope.index(index), kept)
        return True

    def _part(self, table: _Table, dim: int, kept: Numbers) -> _Table:
        question = ("part", table.number, dim, kept.tobytes())
        return self._once(question, lambda: self._table(np.take(table.costs, kept, axis=dim)))


def _unwind(eliminated: list[_Eliminated], count: int) -> Choice:
    choice = [0] * count
    for step in reversed(eliminated):
        *others, own = zip(step.scope, step.open, strict=True)
        place = tuple(int(np.searchsorted(numbers, choice[each])) for each, numbers in others)
        choice[own[0]] = int(own[1][int(step.best[place])])
    return choice


def solve_exactly(problem: Problem, memory_limit: float | None = None) -> Choice:
    """Return the cheapest plan whose bytes, as choices tell them, stay within a limit."""
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
