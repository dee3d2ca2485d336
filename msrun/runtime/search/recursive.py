"""Recursive programming: the mesh is cut axis by axis, the outermost first; at each level every operator gives the axis
to the dimension that is cheapest there, or to none.

After MindSpore's double recursion (Wang et al., "Efficient and systematic partitioning of large and deep neural
networks for parallelization", Euro-Par 2021): operators in order, each decided once a level, time linear in their
number. Afterwards the plan is improved window by window.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from msrun.runtime.search.problem import Choice, Problem
from msrun.runtime.search.windows import improve
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.rule import LabelSplit


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
