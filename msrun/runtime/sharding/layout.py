"""Layouts: how a tensor is cut over the ranks. Pure maths, no torch.

The world is seen as a mesh whose axes are prime factors of its size: 8 ranks are 2 x 2 x 2. Every strategy value
that divides the world is then a set of whole axes, so any two layouts can be compared axis by axis. The factors stand
largest first, unless a device matrix of the user (`Layout`) wants them otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msrun.errors import StrategyError


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
