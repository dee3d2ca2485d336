"""Redistribution: the moves that lead from one layout of a tensor to another with the fewest bytes on the wire.

A move takes axes off the inner end of a dimension's list, puts them on, or both. The chain of moves is the shortest
path between two layouts; the length of a move is what one rank receives for it, forward and backward. The cheapest
chain is not always the one with the fewest moves: a tensor that is cut first is cheaper to gather and to exchange.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout
from msrun.runtime.sharding.sizes import hints

MAX_PIECES = 3
"""Every chain is tried while no more axes, or runs of axes that always stand together, take part in a move. With more,
only chains are tried whose every cut is one that the target has."""


@dataclass(frozen=True)
class Step:
    """One move of a redistribution.

    gather joins the parts of `dim` along `axes` (its innermost); slice keeps this rank's part of `dim`;
    exchange cuts `dim` and joins `from_dim` along the same axes: an all-to-all.
    """

    kind: Literal["gather", "slice", "exchange"]
    dim: int
    axes: Axes
    from_dim: int = -1

    def after(self, layout: TensorLayout) -> TensorLayout:
        """Return the layout that the move leads to."""
        split = list(layout.split)
        if self.kind != "slice":
            source = self.dim if self.kind == "gather" else self.from_dim
            split[source] = split[source][: -len(self.axes)]
        if self.kind != "gather":
            split[self.dim] += self.axes
        return TensorLayout(tuple(split))


@dataclass(frozen=True)
class Move:
    """What a redistribution needs to know."""

    mesh: Mesh
    source: TensorLayout
    target: TensorLayout
    shape: tuple[int, ...]
    """Global shape: every layout on the way cuts it evenly."""
    is_differentiable: bool = True
    """Count the way back of the gradient too."""
    kept_axes: Axes = ()
    """Axes that no move may use, because values differ along them."""

    def __post_init__(self) -> None:
        """Price it by the sizes of the captured call: which chain is cheapest does not bind other calls."""
        object.__setattr__(self, "shape", hints(self.shape))

    def elements(self, step: Step, layout: TensorLayout) -> int:
        """Return how many elements a rank receives for one move of a tensor of `layout`.

        all-gather: the other ranks' parts, (n - 1) x own; all-to-all: (n - 1) / n of the own part, each way. A slice
        is free, its gradient is an all-gather; that of a gather is a slice.
        """
        local = math.prod(layout.local_shape(self.mesh, self.shape))
        parts = self.mesh.extent(step.axes)
        exchanged = local * (parts - 1) // parts
        match step.kind:
            case "gather":
                return local * (parts - 1)
            case "exchange":
                return exchanged * (1 + self.is_differentiable)
            case "slice":
                return exchanged * self.is_differentiable

    def total_elements(self, steps: Sequence[Step]) -> int:
        """Return how many elements a rank receives for a chain of moves."""
        layout, total = self.source, 0
        for step in steps:
            total += self.elements(step, layout)
            layout = step.after(layout)
        return total


@lru_cache(maxsize=4096)
def plan_redistribution(move: Move) -> tuple[Step, ...]:
    """Return the cheapest chain of moves: fewest bytes per rank, then fewest moves."""
    direct = plan_directly(move)
    pieces = _pieces(move)
    if not direct or len(pieces) > MAX_PIECES:
        return direct
    return _shortest(move, lambda layout: _every_step(layout, pieces), limit=move.total_elements(direct))


def plan_directly(move: Move) -> tuple[Step, ...]:
    """Return the cheapest chain of moves whose every cut is one that the target has; sooner found than the cheapest."""
    runs = _runs(move)
    number_of = {run[0]: number for number, run in enumerate(runs)}
    source, target = (
        TensorLayout(tuple(tuple(number_of[axis] for axis in axes if axis in number_of) for axes in layout.split))
        for layout in (move.source, move.target)
    )
    extents = tuple(move.mesh.extent(run) for run in runs)
    return tuple(
        Step(step.kind, step.dim, tuple(itertools.chain.from_iterable(runs[run] for run in step.axes)), step.from_dim)
        for step in _plan_runs(extents, source, target, move.is_differentiable)
    )


@lru_cache(maxsize=65536)
def _plan_runs(
    extents: tuple[int, ...], source: TensorLayout, target: TensorLayout, is_differentiable: bool
) -> tuple[Step, ...]:
    """Return the cheapest direct chain on a mesh of these extents: the same for every shape that both layouts cut
    evenly, because every layout on the way is one of them or less cut."""
    shape = (math.prod(extents),) * len(source.split)
    move = Move(Mesh(extents), source, target, shape, is_differentiable)
    return _shortest(move, lambda layout: _direct_steps(layout, target), limit=None)


def _runs(move: Move) -> list[Axes]:
    """Return the axes that cut something, those together that stand together in both layouts: to move a part of a run
    costs as much as to move all of it."""
    pairs = [set(_pairs(layout)) for layout in (move.source, move.target)]
    used = [layout.used for layout in (move.source, move.target)]
    runs: list[Axes] = []
    for axes in (*move.source.split, *move.target.split):
        for axis in axes:
            if any(axis in run for run in runs):
                continue
            before = runs[-1][-1] if runs else -1
            if runs and all(
                (before, axis) in pair or not own & {before, axis} for pair, own in zip(pairs, used, strict=True)
            ):
                runs[-1] = (*runs[-1], axis)
            else:
                runs.append((axis,))
    return runs


def _shortest(move: Move, next_steps: Callable[[TensorLayout], Iterator[Step]], limit: int | None) -> tuple[Step, ...]:
    """Find the shortest path, nearest layouts first (Dijkstra)."""
    order = itertools.count()
    queue: list[tuple[int, int, int, TensorLayout, tuple[Step, ...]]] = [(0, 0, next(order), move.source, ())]
    done: set[TensorLayout] = set()
    while True:
        length, count, _, layout, steps = heapq.heappop(queue)
        if layout == move.target:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for step in next_steps(layout):
            reached = step.after(layout)
            if reached in done or not reached.fits(move.mesh, move.shape):
                continue
            total = length + move.elements(step, layout)
            if limit is None or total <= limit:
                heapq.heappush(queue, (total, count + 1, next(order), reached, (*steps, step)))


def _direct_steps(layout: TensorLayout, target: TensorLayout) -> Iterator[Step]:
    """Yield the moves that gather, and those that cut a dimension as the target does."""
    dims = range(len(layout.split))
    missing: dict[int, Axes] = {}
    for dim in dims:
        present, wanted = layout.split[dim], target.split[dim]
        missing[dim] = wanted[len(present) :] if wanted[: len(present)] == present else ()
    for dim in dims:
        own = layout.split[dim]
        for count in range(1, len(missing[dim]) + 1):
            if not layout.used & set(missing[dim][:count]):
                yield Step("slice", dim, missing[dim][:count])
        for count in range(1, len(own) + 1):
            yield Step("gather", dim, own[-count:])
            for other in dims:
                if other != dim and missing[other][:count] == own[-count:]:
                    yield Step("exchange", other, own[-count:], dim)


def _every_step(layout: TensorLayout, pieces: Sequence[Axes]) -> Iterator[Step]:
    """Yield every move of whole pieces."""
    free = [piece for piece in pieces if not layout.used & set(piece)]
    cuts = [
        tuple(itertools.chain.from_iterable(some))
        for count in range(1, len(free) + 1)
        for some in itertools.permutations(free, count)
    ]
    dims = range(len(layout.split))
    for dim in dims:
        for axes in cuts:
            yield Step("slice", dim, axes)
        for suffix in _inner_ends(layout.split[dim], pieces):
            yield Step("gather", dim, suffix)
            for other in dims:
                if other != dim:
                    yield Step("exchange", other, suffix, dim)


def _inner_ends(axes: Axes, pieces: Sequence[Axes]) -> Iterator[Axes]:
    """Yield the inner ends of a dimension's list that consist of whole pieces, shortest first."""
    movable = set(itertools.chain.from_iterable(pieces))
    starts = {piece[0] for piece in pieces}
    for begin in reversed(range(len(axes))):
        if axes[begin] not in movable:
            return
        if axes[begin] in starts:
            yield axes[begin:]


def _pieces(move: Move) -> list[Axes]:
    """Return what moves as one: each axis of a small mesh; on a larger one runs that stand together in both layouts."""
    movable = [axis for axis in move.mesh.axes if axis not in move.kept_axes]
    if len(movable) <= MAX_PIECES:
        return [(axis,) for axis in movable]
    neighbours = [set(_pairs(layout)) for layout in (move.source, move.target)]
    pieces: list[Axes] = []
    for axes in (*move.source.split, *move.target.split):
        for axis in axes:
            if axis in itertools.chain.from_iterable(pieces):
                continue
            before = pieces[-1][-1] if pieces else -1
            stand_together = all(
                (before, axis) in pairs or not layout.used & {before, axis}
                for pairs, layout in zip(neighbours, (move.source, move.target), strict=True)
            )
            if pieces and stand_together:
                pieces[-1] = (*pieces[-1], axis)
            else:
                pieces.append((axis,))
    return pieces


def _pairs(layout: TensorLayout) -> Iterator[tuple[int, int]]:
    for axes in layout.split:
        yield from itertools.pairwise(axes)
