"""Improvement of a plan window by window: some operators in a row are decided anew, all at once, beside the others."""

from __future__ import annotations

from collections.abc import Sequence

from msrun.runtime.search.dynamic import Answers, solve_dynamic
from msrun.runtime.search.problem import Choice, Problem, Variable

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
