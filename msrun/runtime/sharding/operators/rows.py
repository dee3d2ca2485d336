"""What rules of lookups share: this rank's rows of a table.

A table that is cut along the dimension looked up in gives partial sums: every rank puts zeros where the row lies with
another one. MindSpore allows that for tables of one or two dimensions and whole indices only; here any table and any
cut of the indices is right.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    numbers_given,
    operator_call,
    summed_axes,
)

LocalLookup = tuple[Callable[..., Tensor], Mapping[str, Any]]
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
    def own_lookup(self, call: OperatorCall, form: Form) -> LocalLookup:
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


aten = torch.ops.aten
BAGS = "b"
"""Label of the dimension of bags."""


class Bags(NamedTuple):
    """Numbers of rows, where each bag begins among them and where the last one ends, and factors of rows, if any."""

    rows: Tensor
    begins: Tensor
    shares: Tensor | None

    def of_rank(self, place: Tensor, mesh_shape: tuple[int, ...], axes: Axes, count: int) -> Bags:
        """Return this rank's `count` bags of those that axes of the mesh cut."""
        is_rising = (self.begins[1:] >= self.begins[:-1]).all() & (self.begins[0] == 0)
        torch._assert_async(is_rising, "offsets of embedding_bag must rise from 0: they are those of the whole batch")
        begins = self.begins.narrow(0, first_of_part(place, mesh_shape, axes, count), count + 1)
        if isinstance(self.rows, FakeTensor):  # shapes alone are asked for
            return self._replace(begins=begins)
        own = slice(int(begins[0]), int(begins[-1]))
        return Bags(self.rows[own], begins - begins[0], None if self.shares is None else self.shares[own])

    def kept(self, is_left_out: Tensor) -> Bags:
        """Return the bags without some of their rows. Only the run knows how many these are."""
        kept = (~is_left_out).nonzero().squeeze(1)
        shares = None if self.shares is None else self.shares.index_select(0, kept)
        return Bags(self.rows.index_select(0, kept), torch.searchsorted(kept, self.begins), shares)

    def pool(self, table: Tensor, mode: str, padding_idx: int | None = None, *, sparse: bool = False) -> Tensor:
        """Return the pooled rows of a table: (bags, width)."""
        return F.embedding_bag(
            self.rows,
            table,
            self.begins,
            mode=mode,
            per_sample_weights=self.shares,
            include_last_offset=True,
            padding_idx=padding_idx,
            sparse=sparse,
        )


def pool_own_bags(
    table: Tensor,
    index: Tensor,
    offsets: Tensor,
    shares: Tensor | None,
    place: Tensor,
    *,
    mesh_shape: tuple[int, ...],
    rows: Axes,
    bags: Axes,
    size: int,
    count: int,
    mode: str,
    padding_idx: int | None,
    has_end: bool,
    sparse: bool,
) -> Tensor:
    """Return this rank's bags of its rows, (count, width): a part of the sum over the axes that cut the rows.

    Args:
        index, shares: of all bags that `offsets` begin.
        rows, bags: axes that cut the table's rows, and the bags.
        size: rows of the whole table.
        count: bags of this rank.
        has_end: the last offset is the end of the last bag.
        sparse: the gradient has the rows that are looked up here and no others.
    """
    begins = offsets if has_end else torch.cat([offsets, offsets.new_full((1,), index.shape[0])])
    own = Bags(index, begins, shares)
    if bags:
        own = own.of_rank(place, mesh_shape, bags, count)
    if not rows:
        return own.pool(table, mode, padding_idx, sparse=sparse)
    local, is_elsewhere = own_rows(own.rows, place, mesh_shape, rows, table.shape[0], size)
    counted = table.new_ones(local.shape)
    counted = counted if padding_idx is None else counted.masked_fill(own.rows == padding_idx, 0)
    factors = counted if own.shares is None else counted * own.shares
    found = Bags(local, own.begins, factors.masked_fill(is_elsewhere, 0))
    if sparse and not isinstance(index, FakeTensor):
        found = found.kept(is_elsewhere | (counted == 0))
    summed = found.pool(table, "sum", sparse=sparse and not isinstance(index, FakeTensor))
    if mode == "sum":
        return summed
    sizes = Bags(torch.zeros_like(local), own.begins, counted).pool(table.new_ones(1, 1), "sum")
    return summed / sizes.clamp_min(1)


def bags_sparsely(node: fx.Node) -> bool:
    """Return whether a local operator pools rows of a table that gets a gradient of these rows alone."""
    if node.target is pool_own_bags:
        return bool(node.kwargs["sparse"])
    is_torchs = node.target in (aten.embedding_bag.default, aten.embedding_bag.padding_idx)
    return is_torchs and bool(operator_call(node).argument("sparse"))


class PooledLookup(Rule):
    """Operators of a table, the numbers of its rows and where bags begin: dimensions ROWS, "e" and BAGS."""

    follows = True

    def has_even_bags(self, call: OperatorCall) -> bool:
        """Return whether the offsets are those of a two-dimensional input: 0, length, 2 * length, ..."""
        offsets, length, count = call.tensors[2], call.shapes[1][0], call.output_shape[0]
        if offsets.target is not aten.arange.start_step or call.argument("include_last_offset"):
            return False
        return count > 0 and offsets.args[:3] == (0, length, length // count) and length % count == 0

    @abstractmethod
    def settings(self, call: OperatorCall) -> Mapping[str, Any]:
        """Return `mode`, `padding_idx`, `sparse` and `has_end` for `pool_own_bags`."""

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Look up this rank's bags in its rows, then all-reduce."""
        if not any(split.values()):
            return self.local_call(call, build, inputs)
        rows, bags = split.get(ROWS, ()), split.get(BAGS, ())
        count = form.sizes[BAGS] // build.mesh.extent(bags)
        table, index, offsets, *shares = inputs
        if self.has_even_bags(call):  # the bags of every rank begin at the same places of its indices
            offsets, bags = build.call(aten.slice.Tensor, offsets, 0, 0, count), ()
        elif bags:
            offsets = build.collective(Collective("gather", bags, 0), offsets)
        if not rows and not bags:
            local = self.local_call(call, build, (table, index, offsets, *shares))
            return build.pack({0: build.call(operator.getitem, local, 0)})
        given = (table, index, offsets, shares[0] if shares else None, build.place())
        cut = {"mesh_shape": build.mesh.shape, "rows": rows, "bags": bags, "size": form.sizes[ROWS], "count": count}
        found = build.call(pool_own_bags, *given, **cut, **self.settings(call))
        return build.pack({0: build.sum_over(found, summed_axes(form, split))})


class Arriving(Protocol):
    """Rows on their way."""

    def wait(self) -> Tensor:
        """Return them."""


class Carrier(Protocol):
    """Who sends rows; `execute` has one."""

    def start(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], mesh: Mesh, axes: Axes, what: str
    ) -> Arriving:
        """Send each rank along some axes its rows: (sum of sent, ..) -> (sum of received, ..).

        Args:
            rows: contiguous, in rank order; nobody may write to them before the wait.
            what: name of the message.
        """

    def count(self, what: str, nbytes: int) -> None:
        """Count what an operator sends, all its messages as one."""


carrier: Carrier
"""Set when `execute` is loaded."""
