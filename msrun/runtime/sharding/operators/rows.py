"""What rules of lookups share: this rank's rows of a table.

A table that is cut along the dimension looked up in gives partial sums: every rank puts zeros where the row lies with
another one. MindSpore allows that for tables of one or two dimensions and whole indices only; here any table and any
cut of the indices is right.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    numbers_given,
    summed_axes,
)

Lookup = tuple[Callable[..., Tensor], Mapping[str, Any]]
ROWS = "v"
"""Label of the dimension that is looked up in."""


def first_of_part(place: Tensor, mesh_shape: tuple[int, ...], axes: Axes, length: int) -> int:
    """Return where this rank's part of a dimension begins.

    Args:
        place: this rank's number in the mesh.
        length: size of the part.
    """
    return Mesh(tuple(mesh_shape)).index(numbers_given(place)[0], tuple(axes)) * length


def own_rows(
    index: Tensor, place: Tensor, mesh_shape: tuple[int, ...], axes: Axes, length: int, size: int
) -> tuple[Tensor, Tensor]:
    """Return indices into this rank's rows, and where the row lies with another rank (its index is 0 there).

    Args:
        length: rows of this rank.
        size: rows of the whole table; an index outside it is an error, as it is for one process.
    """
    torch._assert_async(((index >= 0) & (index < size)).all(), f"index out of range: a table has {size} rows")
    local = index - first_of_part(place, mesh_shape, axes, length)
    is_elsewhere = (local < 0) | (local >= length)
    return local.masked_fill(is_elsewhere, 0), is_elsewhere


class RowLookup(Rule):
    """Operators of a table and the numbers of its rows, in this order."""

    @abstractmethod
    def own_lookup(self, call: OperatorCall, form: Form) -> Lookup:
        """Return what looks up in this rank's rows, and its settings.

        It is called with the inputs, this rank's place, the shape of the mesh, the axes that cut the rows and the
        number of all rows.
        """

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Look up, with zeros for rows of other ranks, then all-reduce."""
        axes = split.get(ROWS, ())
        if not axes:
            return self.local_call(call, build, inputs)
        look_up, settings = self.own_lookup(call, form)
        found = build.call(look_up, *inputs, build.place(), build.mesh.shape, axes, form.sizes[ROWS], **settings)
        return build.sum_over(found, summed_axes(form, split))
