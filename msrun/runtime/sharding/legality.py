"""The legal strategy nearest to one that an operator does not allow, for error messages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.operators.rule import Form, Label

Numbers = tuple[tuple[int, ...], ...]
CHOICES = 5
"""Numbers of parts that are tried for one dimension."""


def nearest_legal(form: Form, mesh: Mesh, wanted: Sequence[Sequence[int]]) -> Numbers:
    """Return the whole legal strategy that is nearest: least sum of |log(legal / wanted)| over the dimensions.

    Args:
        wanted: the user's numbers, one row per input; rows of a wrong length are read as far as they go.
    """
    wishes: dict[str, int] = {}
    for labels, numbers in zip(form.inputs, wanted, strict=False):
        for label, number in zip(labels, numbers, strict=False):
            if label is not None and number > 0:
                wishes[label] = max(wishes.get(label, 1), number)
    best = min(_legal(form, mesh, wishes), key=lambda parts: (_distance(parts, wishes), sorted(parts.items())))
    return tuple(tuple(best.get(label, 1) if label else 1 for label in labels) for labels in form.inputs)


def _legal(form: Form, mesh: Mesh, wishes: dict[str, int]) -> Iterator[dict[str, int]]:
    choices = [_choices(form, mesh, label, wish) for label, wish in wishes.items()]
    for numbers in itertools.product(*choices):
        if mesh.size % math.prod(numbers) == 0:
            yield dict(zip(wishes, numbers, strict=True))


def _choices(form: Form, mesh: Mesh, label: Label, wish: int) -> list[int]:
    """Return 1 and the nearest numbers that divide the ranks and that the dimension can be cut into."""
    divisors = [n for n in range(1, mesh.size + 1) if mesh.size % n == 0 and (n == 1 or form.can_split(label, n))]
    return sorted({1, *sorted(divisors, key=lambda n: abs(math.log(n / wish)))[:CHOICES]})


def _distance(parts: dict[str, int], wishes: dict[str, int]) -> float:
    return round(sum(abs(math.log(parts[label] / wish)) for label, wish in wishes.items()), 9)
