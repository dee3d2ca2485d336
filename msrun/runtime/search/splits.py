"""The splits that a search tries for one operator: which mesh axes cut which of its dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.rule import Form, LabelSplit

MOST_AXES_FREE = 2
"""On a mesh of so many axes every axis may cut any dimension; on a larger one the outer and the inner axes go together,
as data parallel between hosts and tensor parallel in a host do."""
MOST_INNER_RANKS = 16
"""Ranks that the inner axes of a larger mesh may have."""


def find_splits(form: Form, mesh: Mesh) -> list[LabelSplit]:
    """Return the legal splits of an operator, the whole one first; the order is the same on every rank."""
    labels = _labels(form)
    found: dict[tuple[tuple[str, Axes], ...], LabelSplit] = {(): {}}
    for pieces, places in _placements(mesh, labels):
        split: dict[str, Axes] = {}
        for axes, label in zip(pieces, places, strict=True):
            if label is not None:
                split[label] = (*split.get(label, ()), *axes)
        if all(form.can_split(label, mesh.extent(axes)) for label, axes in split.items()):
            found.setdefault(tuple(sorted(split.items())), split)
    return list(found.values())


def parts_of(form: Form, split: LabelSplit, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return MindSpore's tuples of a split: parts per dimension, per input."""
    return tuple(form.layout_of_input(index, split, mesh).numbers(mesh) for index in range(len(form.inputs)))


def ranks_used(split: LabelSplit, mesh: Mesh) -> int:
    """Return into how many parts a split cuts the work."""
    return math.prod(mesh.extent(axes) for axes in split.values())


def _labels(form: Form) -> list[str]:
    """Return the labels that may be cut at all, in order of appearance."""
    rows = (*form.inputs, form.output, *form.others)
    seen = dict.fromkeys(label for labels in rows for label in labels if label is not None)
    return [label for label in seen if label not in form.whole and form.sizes[label] > 1]


def _placements(mesh: Mesh, labels: Sequence[str]) -> Iterator[tuple[tuple[Axes, ...], tuple[str | None, ...]]]:
    """Yield runs of axes and the label that each of them cuts, or None."""
    places: list[str | None] = [*labels, None]
    if len(mesh.axes) <= MOST_AXES_FREE:
        pieces: tuple[Axes, ...] = tuple((axis,) for axis in mesh.axes)
        for chosen in itertools.product(places, repeat=len(pieces)):
            yield pieces, chosen
        return
    for begin in range(len(mesh.axes) + 1):
        outer, inner = mesh.axes[:begin], mesh.axes[begin:]
        if inner and mesh.extent(inner) > MOST_INNER_RANKS and outer:
            continue
        for first, second in itertools.product(places if outer else [None], places if inner else [None]):
            if first is not None or not outer:  # what the outer axes leave whole, the inner ones need not cut
                yield (outer, inner), (first, second)
