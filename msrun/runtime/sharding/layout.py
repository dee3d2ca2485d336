"""Layouts: how a tensor is cut over the ranks. Pure maths, no torch.

The world is seen as a mesh whose axes are prime factors of its size: 8 ranks are 2 x 2 x 2. Every strategy value
that divides the world is then a set of whole axes, so any two layouts can be compared axis by axis. The factors stand
largest first, unless a device matrix of the user (`Layout`) wants them otherwise.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from msrun.errors import StrategyError
from msrun.runtime.sharding.sizes import hints


@dataclass(frozen=True)
class Box:
    """A part of a whole tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """True when nothing is missing."""
        return self.sizes == self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it is in the whole tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return what both have; None when that is nothing."""
        both = list(zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        begins = tuple(max(a, b) for a, _, b, _ in both)
        ends = (min(a + n, b + m) for a, n, b, m in both)
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(self.shape, begins, sizes) if all(size > 0 for size in sizes) else None


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a tensor that is whole on this rank."""
    shape = tuple(shape)
    return Box(shape, (0,) * len(shape), shape)


Axes = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """Ranks as a grid, row-major: the last axis changes fastest. All of the world, or those of a pipeline stage."""

    shape: tuple[int, ...]
    first_rank: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def ranks(self) -> range:
        """The world ranks of it."""
        return range(self.first_rank, self.first_rank + self.size)

    @property
    def axes(self) -> Axes:
        """All axes."""
        return tuple(range(len(self.shape)))

    def coordinates(self, global_rank: int) -> tuple[int, ...]:
        """Return the place of a rank on every axis."""
        place = []
        rest = global_rank - self.first_rank
        for size in reversed(self.shape):
            rest, index = divmod(rest, size)
            place.append(index)
        return tuple(reversed(place))

    def extent(self, axes: Axes) -> int:
        """Return the number of ranks along these axes together."""
        return math.prod(self.shape[axis] for axis in axes)

    def stride(self, axis: int) -> int:
        """Return how many ranks lie between two neighbours along an axis."""
        return math.prod(self.shape[axis + 1 :])

    def index(self, global_rank: int, axes: Axes) -> int:
        """Return a rank's place along `axes` read as one number, first axis most significant."""
        place = self.coordinates(global_rank)
        index = 0
        for axis in axes:
            index = index * self.shape[axis] + place[axis]
        return index

    def members(self, global_rank: int, axes: Axes) -> tuple[int, ...]:
        """Return the ranks that differ from a rank only along `axes`, ordered by `index`; the mesh is not listed."""
        steps = [range(0, self.shape[axis] * self.stride(axis), self.stride(axis)) for axis in axes]
        place = self.coordinates(global_rank)
        first = global_rank - sum(place[axis] * self.stride(axis) for axis in axes)
        return tuple(first + sum(offsets) for offsets in itertools.product(*steps))


def build_mesh(world_size: int, first_rank: int = 0, *, strides: Iterable[int] = ()) -> Mesh:
    """Return the mesh of prime factors, largest first: 12 -> 3 x 2 x 2; 1 -> no axis.

    Args:
        world_size: number of ranks, from `first_rank` on.
        strides: numbers of neighbouring ranks at which an axis must begin, because a device matrix has one there:
            2 x 3 of 6 ranks has the strides 3 and 6, so its mesh is 2 x 3.
    """
    chain = sorted({1, world_size, *strides})
    for inner, outer in itertools.pairwise(chain):
        if outer % inner:
            raise StrategyError(
                f"no mesh of {world_size} ranks has axes that begin at every {inner} and at every {outer} ranks; "
                "give device matrices that divide the ranks alike"
            )
    parts = [outer // inner for inner, outer in itertools.pairwise(chain)]
    return Mesh(tuple(factor for part in reversed(parts) for factor in prime_factors(part)), first_rank)


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, largest first; none for 1."""
    factors = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return sorted(factors, reverse=True)


@dataclass(frozen=True)
class TensorLayout:
    """How one tensor is cut: per dimension the mesh axes that cut it, most significant first.

    An axis that cuts no dimension holds copies. The gradient of a tensor always has the tensor's own layout.
    """

    split: tuple[Axes, ...]

    @classmethod
    def replicated(cls, ndim: int) -> TensorLayout:
        """Return the layout in which every rank holds the whole tensor."""
        return cls(((),) * ndim)

    @property
    def used(self) -> frozenset[int]:
        """Axes that cut some dimension."""
        return frozenset(itertools.chain.from_iterable(self.split))

    def copies(self, mesh: Mesh) -> Axes:
        """Return the axes along which ranks hold the same part."""
        return tuple(axis for axis in mesh.axes if axis not in self.used)

    def local_shape(self, mesh: Mesh, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one rank's part."""
        return tuple(size // mesh.extent(axes) for size, axes in zip(shape, self.split, strict=True))

    def slices(self, mesh: Mesh, shape: Sequence[int], global_rank: int) -> tuple[slice, ...]:
        """Return which part of the whole tensor a rank holds."""
        parts = []
        for size, axes in zip(shape, self.split, strict=True):
            length = size // mesh.extent(axes)
            begin = mesh.index(global_rank, axes) * length
            parts.append(slice(begin, begin + length))
        return tuple(parts)

    def fits(self, mesh: Mesh, shape: Sequence[int]) -> bool:
        """Return True when every dimension is cut into equal parts."""
        return all(size % mesh.extent(axes) == 0 for size, axes in zip(shape, self.split, strict=True))

    def numbers(self, mesh: Mesh) -> tuple[int, ...]:
        """Return MindSpore's tuple: the number of parts of every dimension."""
        return tuple(mesh.extent(axes) for axes in self.split)


def assign_axes(
    mesh: Mesh,
    numbers: Sequence[int],
    *,
    what: str,
    near: TensorLayout | None = None,
    order: Sequence[int] | None = None,
) -> tuple[Axes, ...]:
    """Give each number of parts its own mesh axes, leftmost first; what is left over holds copies.

    Args:
        near: a layout whose axes are kept where the numbers allow it, so that nothing moves without need.
        order: the order in which axes are taken, instead of from left to right.
    """
    kept = [_kept(mesh, axes, number) for axes, number in zip(near.split, numbers, strict=True)] if near else []
    kept = kept or [()] * len(numbers)
    free = [axis for axis in order or mesh.axes if not any(axis in axes for axes in kept)]
    assigned: list[Axes] = []
    for number, own in zip(numbers, kept, strict=True):
        axes = _take(mesh, free, number // mesh.extent(own))
        if axes is None and near is not None:
            return assign_axes(mesh, numbers, what=what, order=order)
        if axes is None:
            raise StrategyError(
                f"{what}: {math.prod(numbers)} parts do not divide {mesh.size} ranks; "
                f"the numbers of a strategy must multiply to a divisor of {mesh.size}"
            )
        for axis in axes:
            free.remove(axis)
        assigned.append(own + axes)
    return tuple(assigned)


def _kept(mesh: Mesh, axes: Axes, number: int) -> Axes:
    """Return the outermost axes that a number of parts can begin with."""
    kept: Axes = ()
    for axis in axes:
        if number % mesh.extent((*kept, axis)):
            break
        kept = (*kept, axis)
    return kept


def _take(mesh: Mesh, free: Sequence[int], number: int) -> Axes | None:
    taken: list[int] = []
    rest = number
    for axis in free:
        if rest % mesh.shape[axis] == 0:
            taken.append(axis)
            rest //= mesh.shape[axis]
        if rest == 1:
            break
    return tuple(taken) if rest == 1 else None


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
    return _runs(move)


def _pairs(layout: TensorLayout) -> Iterator[tuple[int, int]]:
    for axes in layout.split:
        yield from itertools.pairwise(axes)
