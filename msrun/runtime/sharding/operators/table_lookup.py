"""Rule for the lookup of an EmbeddingLookup: rows of a table that the ranks share out, or that is whole on all of them.

The indices may be cut in any way. A table that is shared out keeps its layout, whatever cuts the indices: the operator
itself exchanges the rows that a rank asks for, and their gradients. Of a whole table every rank looks up its own
indices, and the rows of the gradient are added up over the ranks when it leaves.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from msrun.errors import CaptureError
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.rows import (
    BAGS,
    ROWS,
    LocalLookup,
    PooledLookup,
    RowLookup,
    bags_sparsely,
    first_of_part,
    own_rows,
)
from msrun.runtime.sharding.operators.rule import (
    Form,
    Label,
    Labels,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    Rules,
    aligned,
    dimension_labels,
    free_labels,
    numbers_given,
    operator_call,
    sizes_of,
    stand_in,
    user_line,
)

aten = torch.ops.aten


def embed_own_rows(
    table: Tensor,
    index: Tensor,
    place: Tensor,
    mesh_shape: tuple[int, ...],
    axes: Axes,
    size: int,
    *,
    padding_idx: int,
    sparse: bool,
) -> Tensor:
    """Return this rank's part of the sum that is `F.embedding` of the whole table: (rows, ..), any -> (any, ..).

    Args:
        sparse: the gradient has the rows that are looked up here and no others.
    """
    length = table.shape[0]
    local, is_elsewhere = own_rows(index, place, mesh_shape, axes, length, size)
    padding = padding_idx - first_of_part(place, mesh_shape, axes, length)
    is_mine = padding_idx >= 0 and 0 <= padding < length
    own_padding = padding if is_mine else None
    if sparse and not isinstance(index, FakeTensor):  # of which nobody knows how many rows lie here
        kept = (~is_elsewhere).reshape(-1).nonzero().squeeze(1)
        rows = F.embedding(local.reshape(-1).index_select(0, kept), table, own_padding, sparse=True)
        return rows.new_zeros(index.numel(), table.shape[1]).index_copy(0, kept, rows).view(*index.shape, -1)
    found = F.embedding(local, table, own_padding)
    return found.masked_fill(is_elsewhere.unsqueeze(-1), 0)


def gather_own_rows(
    table: Tensor, index: Tensor, place: Tensor, mesh_shape: tuple[int, ...], axes: Axes, size: int, *, dim: int
) -> Tensor:
    """Return this rank's part of the sum that is `torch.gather` of the whole table."""
    local, is_elsewhere = own_rows(index, place, mesh_shape, axes, table.shape[dim], size)
    return table.gather(dim, local).masked_fill(is_elsewhere, 0)


def select_own_rows(
    table: Tensor, index: Tensor, place: Tensor, mesh_shape: tuple[int, ...], axes: Axes, size: int, *, dim: int
) -> Tensor:
    """Return this rank's part of the sum that is the whole table indexed by one tensor in dimension `dim`."""
    local, is_elsewhere = own_rows(index, place, mesh_shape, axes, table.shape[dim], size)
    found = table.index_select(dim, local.reshape(-1))
    mask = is_elsewhere.reshape([-1] + [1] * (table.dim() - dim - 1))
    return (
        found.masked_fill(mask, 0).unflatten(dim, index.shape)
        if index.dim()
        else found.masked_fill(mask, 0).squeeze(dim)
    )


class Embedding(RowLookup):
    """embedding: y[i.., e] = w[x[i..], e]. Strategy as MindSpore's Gather: (table, indices)."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels v, e and those of the indices."""
        table, index = call.shapes
        rows = dimension_labels("i", len(index))
        counts_rows = bool(call.argument("scale_grad_by_freq"))
        if counts_rows and call.argument("sparse"):
            raise CaptureError(
                "embedding(sparse=True, scale_grad_by_freq=True): torch has no such gradient; give one of both",
                where=user_line(call.node),
            )
        whole = frozenset({ROWS, *rows}) if counts_rows else frozenset[str]()
        inputs = ((ROWS, "e"), rows)
        return Form(inputs, (*rows, "e"), sizes_of(*zip(inputs, (table, index), strict=True)), whole)

    def own_lookup(self, call: OperatorCall, _: Form) -> LocalLookup:
        """Look up, with zeros for rows of other ranks."""
        padding = call.argument("padding_idx")
        return embed_own_rows, {"padding_idx": padding, "sparse": bool(call.argument("sparse"))}


def embeds_sparsely(node: fx.Node) -> bool:
    """Return whether a local operator is an embedding whose table gets a gradient of rows alone."""
    if node.target is embed_own_rows:
        return bool(node.kwargs["sparse"])
    return node.target is aten.embedding.default and bool(operator_call(node).argument("sparse"))


class Gather(RowLookup):
    """gather and take_along_dim with a dimension: y[.., g, ..] = x[.., index[.., g, ..], ..]."""

    def form(self, call: OperatorCall) -> Form:
        """Return labels: v in the table, g in the index, the same elsewhere where sizes agree."""
        table, index = call.shapes
        dim = call.dimension()
        labels = dimension_labels("d", len(table))
        shared: list[Label] = [
            label if size == other else None for label, size, other in zip(labels, table, index, strict=True)
        ]
        of_table: Labels = tuple(ROWS if i == dim else label for i, label in enumerate(shared))
        of_index: Labels = tuple("g" if i == dim else label for i, label in enumerate(shared))
        return Form((of_table, of_index), of_index, sizes_of((of_table, table), (of_index, index)), _if_bool(call))

    def own_lookup(self, _: OperatorCall, form: Form) -> LocalLookup:
        """Look up, with zeros for rows of other ranks."""
        return gather_own_rows, {"dim": form.inputs[0].index(ROWS)}


class Scatter(Rule):
    """scatter, scatter_add: the dimension written in stays whole, and others where the index lacks a part of them."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return equal labels of the table, the index and the source."""
        table = call.shapes[0]
        dim = call.dimension()
        labels: Labels = tuple(
            label if i != dim and all(shape[i : i + 1] == table[i : i + 1] for shape in call.shapes) else None
            for i, label in enumerate(dimension_labels("d", len(table)))
        )
        return Form((labels,) * len(call.shapes), labels, sizes_of((labels, table)))


class Select(RowLookup):
    """index_select, and x[:, index] by one tensor: the indexed dimension becomes those of the index."""

    def form(self, call: OperatorCall) -> Form:
        """Return labels: v in the table, those of the index in its place."""
        table, index = call.shapes
        dim = self._dim(call)
        labels = dimension_labels("d", len(table))
        rows = dimension_labels("i", len(index))
        of_table: Labels = tuple(ROWS if i == dim else label for i, label in enumerate(labels))
        output = (*of_table[:dim], *rows, *of_table[dim + 1 :])
        return Form((of_table, rows), output, sizes_of((of_table, table), (rows, index)), _if_bool(call))

    @staticmethod
    def _dim(call: OperatorCall) -> int:
        if call.node.target is aten.index_select.default:
            return call.dimension()
        return next(i for i, index in enumerate(call.argument("indices")) if index is not None)

    def own_lookup(self, _: OperatorCall, form: Form) -> LocalLookup:
        """Look up, with zeros for rows of other ranks."""
        return select_own_rows, {"dim": form.inputs[0].index(ROWS)}


class Index(Select):
    """x[a, :, b]: by several tensors, which are broadcast against each other; the indexed dimensions stay whole.

    Their dimensions come where the first index stands, or first of all when indices do not stand side by side: the
    rule of numpy's advanced indexing. One index is that of `Select`.
    """

    def form(self, call: OperatorCall) -> Form:
        """Return labels; indexed dimensions have none."""
        if len(call.tensors) == 2:
            return super().form(call)
        table, *indices = call.shapes
        given = call.argument("indices")
        places = [i for i, index in enumerate(given) if index is not None]
        shape = torch.broadcast_shapes(*indices)
        rows = dimension_labels("i", len(shape))
        labels = dimension_labels("d", len(table))
        of_table = free_labels(len(table), places)
        of_indices = [aligned(rows, shape, index) for index in indices]
        kept = [label for i, label in enumerate(labels) if i not in places]
        is_side_by_side = places == list(range(places[0], places[0] + len(places)))
        first = places[0] if is_side_by_side else 0
        output = (*kept[:first], *rows, *kept[first:])
        sizes = sizes_of((of_table, table), (rows, shape))
        return Form((of_table, *of_indices), output, sizes)


class OneHot(Rule):
    """one_hot: the new dimension of classes is made whole on every rank; a reader that wants a part takes it."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return the labels of the input and one more dimension."""
        labels = dimension_labels("i", len(call.shapes[0]))
        return Form((labels,), (*labels, None), sizes_of((labels, call.shapes[0])))


def _if_bool(call: OperatorCall) -> frozenset[str]:
    """Truth values cannot be added up, so a table of them stays whole."""
    return frozenset({ROWS}) if call.tensors[0].meta["val"].dtype == torch.bool else frozenset()


RULES: Rules = [
    (Embedding(), [aten.embedding.default]),
    (Gather(), [aten.gather.default]),
    (Scatter(), [aten.scatter.value, aten.scatter.src, aten.scatter_add.default]),
    (Select(), [aten.index_select.default]),
    (Index(), [aten.index.Tensor]),
    (OneHot(), [aten.one_hot.default]),
]


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


def _shape(table: Tensor, index: Tensor, number: int) -> Tensor:
    _lookups[number].check(index)
    return table.new_empty(*index.shape, _lookups[number].width, device=index.device)


OPERATOR = stand_in("msrun::table_lookup", _shape)


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


RULES += [(TableLookup(), [OPERATOR])]


_MODES = ("sum", "mean", "max")


class EmbeddingBag(PooledLookup):
    """y[b, e] = sum, mean or maximum over the indices i of bag b of w[i, e]. Strategy: (table, indices, offsets)."""

    def form(self, call: OperatorCall) -> Form:
        """Return labels v, e and b: that of the indices when bags are of equal length, else of the offsets."""
        counts_rows = bool(call.argument("scale_grad_by_freq"))  # of the whole batch
        if counts_rows and call.argument("sparse"):
            raise CaptureError(
                "embedding_bag(sparse=True, scale_grad_by_freq=True): torch has no such gradient; give one of both",
                where=user_line(call.node),
            )
        table, _, offsets, *shares = call.shapes
        bags, *rest = call.output_shapes
        is_even = self.has_even_bags(call)
        of_index: Labels = (BAGS,) if is_even else (None,)
        of_offsets: Labels = (BAGS,) if not is_even and offsets[0] == bags[0] else (None,)
        whole = {ROWS} if _MODES[call.argument("mode")] == "max" else set()
        if counts_rows:
            whole = {ROWS, BAGS}
        if call.reads_others:  # they are about the whole batch
            whole = {ROWS, "e", BAGS}
        inputs = ((ROWS, "e"), of_index, of_offsets, *(of_index for _ in shares))
        sizes = sizes_of((inputs[0], table), ((BAGS, None), bags))
        return Form(inputs, (BAGS, "e"), sizes, frozenset(whole), tuple((None,) * len(shape) for shape in rest))

    def settings(self, call: OperatorCall) -> Mapping[str, Any]:
        """Return how the rows of a bag are pooled."""
        return {
            "mode": _MODES[call.argument("mode")],
            "padding_idx": call.argument("padding_idx"),
            "has_end": bool(call.argument("include_last_offset")),
            "sparse": bool(call.argument("sparse")),
        }


RULES += [(EmbeddingBag(), [aten.embedding_bag.default, aten.embedding_bag.padding_idx])]


def gives_rows(node: fx.Node) -> bool:
    """Return whether the table that a local operator reads gets a gradient of the rows that it looks up."""
    return embeds_sparsely(node) or looks_up_sparsely(node) or bags_sparsely(node)
