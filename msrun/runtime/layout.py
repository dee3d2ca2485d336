"""Layouts: how a tensor is cut over the ranks. Pure maths, no torch.

The world is seen as a mesh whose axes are the prime factors of its size: 8 ranks are 2 x 2 x 2. Every strategy value
that divides the world is then a set of whole axes, so any two layouts can be compared axis by axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msrun.errors import StrategyError

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

    def index(self, global_rank: int, axes: Axes) -> int:
        """Return a rank's place along `axes` read as one number, first axis most significant."""
        place = self.coordinates(global_rank)
        index = 0
        for axis in axes:
            index = index * self.shape[axis] + place[axis]
        return index

    def groups(self, axes: Axes) -> list[tuple[int, ...]]:
        """Return every group of ranks that differ only along `axes`, each ordered by `index`."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            place = self.coordinates(rank)
            found.setdefault(tuple(p for axis, p in enumerate(place) if axis not in axes), []).append(rank)
        return [tuple(sorted(ranks, key=lambda rank: self.index(rank, axes))) for ranks in found.values()]


def build_mesh(world_size: int, first_rank: int = 0) -> Mesh:
    """Return the mesh of prime factors, largest first: 12 -> 3 x 2 x 2; 1 -> no axis.

    Args:
        world_size: number of ranks, from `first_rank` on.
    """
    factors = []
    rest, factor = world_size, 2
    while rest > 1:
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
        factor += 1
    return Mesh(tuple(sorted(factors, reverse=True)), first_rank)


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


def plan_redistribution(source: TensorLayout, target: TensorLayout) -> list[Step]:
    """Return the moves from one layout to another.

    Axes are taken off and put on at the inner end of a dimension's list. What can be cut for nothing is cut first,
    then parts that only change their dimension are exchanged, then the rest is gathered and cut again.
    """
    current = [list(axes) for axes in source.split]
    steps: list[Step] = []

    def surplus(dim: int) -> Axes:
        kept = len(_common_prefix(current[dim], target.split[dim]))
        return tuple(current[dim][kept:])

    def missing(dim: int) -> Axes:
        kept = len(_common_prefix(current[dim], target.split[dim]))
        return target.split[dim][kept:]

    def cut_what_is_free() -> None:
        used = set(itertools.chain.from_iterable(current))
        for dim in range(len(current)):
            wanted = missing(dim)
            if wanted and not surplus(dim) and not used & set(wanted):
                steps.append(Step("slice", dim, wanted))
                current[dim] += wanted
                used |= set(wanted)

    cut_what_is_free()
    for from_dim, dim in itertools.permutations(range(len(current)), 2):
        moved = surplus(from_dim)
        if moved and not surplus(dim) and missing(dim)[: len(moved)] == moved:
            steps.append(Step("exchange", dim, moved, from_dim))
            del current[from_dim][-len(moved) :]
            current[dim] += moved
    for dim in range(len(current)):
        extra = surplus(dim)
        if extra:
            steps.append(Step("gather", dim, extra))
            del current[dim][-len(extra) :]
    cut_what_is_free()
    return steps


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))]


def assign_axes(mesh: Mesh, numbers: Sequence[int], *, what: str) -> tuple[Axes, ...]:
    """Give each number of parts its own mesh axes, leftmost first; what is left over holds copies.

    Raises:
        StrategyError: the numbers do not multiply to a divisor of the world, or cannot be made of its factors.
    """
    free = list(mesh.axes)
    assigned: list[Axes] = []
    for number in numbers:
        axes = _take(mesh, free, number)
        if axes is None:
            raise StrategyError(
                f"{what}: {math.prod(numbers)} parts do not divide {mesh.size} ranks; "
                f"the numbers of a strategy must multiply to a divisor of {mesh.size}"
            )
        for axis in axes:
            free.remove(axis)
        assigned.append(axes)
    return tuple(assigned)


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
