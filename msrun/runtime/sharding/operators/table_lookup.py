"""Rule for the lookup of an EmbeddingLookup: rows of a table that the ranks share out, or that is whole on all of them.

The indices may be cut in any way. A table that is shared out keeps its layout, whatever cuts the indices: the operator
itself exchanges the rows that a rank asks for, and their gradients. Of a whole table every rank looks up its own
indices, and the rows of the gradient are added up over the ranks when it leaves.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    dimension_labels,
    numbers_given,
    sizes_of,
)


class Lookup(Protocol):
    """Who looks up in a table."""

    width: int
    """Elements of a whole row."""
    cut_dimension: int | None
    """The table's dimension that the ranks share out; None: it is whole on all of them."""
    is_sparse: bool
    """Whether the table's gradient is one of rows."""

    def check(self, index: Tensor) -> None:
        """Refuse what cannot be looked up, whatever its values."""

    def run(self, table: Tensor, index: Tensor, mesh: Mesh, *, gives_gradient: bool) -> Tensor:
        """Return the rows of this rank's indices: any -> (any, width).

        Args:
            gives_gradient: False on ranks whose indices are copies of another rank's.
        """


_lookups: weakref.WeakValueDictionary[int, Lookup] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number_lookup(lookup: Lookup) -> int:
    """Return a number by which operators know who looks up, for as long as it lives."""
    number = next(_numbers)
    _lookups[number] = lookup
    return number


@torch.library.custom_op("msrun::table_lookup", mutates_args=())
def _operator(table: Tensor, index: Tensor, number: int) -> Tensor:
    return table.new_empty(*index.shape, _lookups[number].width, device=index.device)


@_operator.register_fake
def _(table: Tensor, index: Tensor, number: int) -> Tensor:
    _lookups[number].check(index)
    return table.new_empty(*index.shape, _lookups[number].width, device=index.device)


def _no_backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG001
    raise RuntimeError("a captured graph is not run")


_operator.register_autograd(_no_backward)
OPERATOR = torch.ops.msrun.table_lookup.default


def look_up(
    table: Tensor,
    index: Tensor,
    place: Tensor,
    *,
    number: int,
    mesh_shape: tuple[int, ...],
    first_rank: int,
    same: Axes,
) -> Tensor:
    """Return the rows of this rank's indices, as an operator of a local graph.

    Args:
        same: axes along which ranks have the same indices.
    """
    if isinstance(table, FakeTensor):
        return _OnFakes.apply(table, index, _lookups[number].width)
    mesh = Mesh(tuple(mesh_shape), first_rank)
    is_first = mesh.index(first_rank + numbers_given(place)[0], tuple(same)) == 0
    return _lookups[number].run(table, index, mesh, gives_gradient=is_first)


class _OnFakes(torch.autograd.Function):
    """The lookup's shape, type and need of a gradient."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, width: int) -> Tensor:
        ctx.table = table.shape
        return table.new_empty(*index.shape, width, device=index.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.new_empty(ctx.table), None, None


class TableLookup(Rule):
    """y[i.., e] = w[x[i..], e]. The indices keep their layout; a row is whole where it is looked up."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels of the indices."""
        rows = dimension_labels("i", len(call.shapes[1]))
        cut = _lookups[call.argument("number")].cut_dimension
        shared_out = {} if cut is None else {0: cut}
        return Form(((None, None), rows), (*rows, None), sizes_of((rows, call.shapes[1])), shared_out=shared_out)

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Look up this rank's indices."""
        used = {axis for axes in split.values() for axis in axes}
        same = tuple(axis for axis in build.mesh.axes if axis not in used) if form.shared_out else ()
        return build.call(
            look_up,
            *inputs,
            build.place(),
            number=call.argument("number"),
            mesh_shape=build.mesh.shape,
            first_rank=build.mesh.first_rank,
            same=same,
        )


def looks_up_sparsely(node: fx.Node) -> bool:
    """Return whether a local operator is a lookup whose table gets a gradient of rows alone."""
    return node.target is look_up and _lookups[node.kwargs["number"]].is_sparse  # type: ignore[index]


RULES = [(TableLookup(), [OPERATOR])]
