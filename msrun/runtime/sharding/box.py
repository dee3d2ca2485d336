"""A box: what one rank has of a whole tensor, along every dimension a run of indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    def slices_in(self, other: Box) -> tuple[slice, ...]:
        """Return where it is in a box around it."""
        begins = (begin - first for begin, first in zip(self.offsets, other.offsets, strict=True))
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.sizes, strict=True))

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
