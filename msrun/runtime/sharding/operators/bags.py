"""Rule for embedding_bag: rows of a table looked up and summed, averaged or compared bag by bag.

Bags of equal length, which a two-dimensional input makes, are cut with the rows of the batch: every rank looks up its
own. Bags that start at offsets of the user's own are cut too, but which indices they hold only the run can tell: every
rank has all indices and takes those of its bags. A table that is cut by rows gives partial sums, as in `lookup`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from msrun.errors import CaptureError
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes
from msrun.runtime.sharding.operators.lookup import ROWS, first_of_part, own_rows
from msrun.runtime.sharding.operators.rule import (
    Form,
    Labels,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    operator_call,
    sizes_of,
    summed_axes,
)

aten = torch.ops.aten
BAGS = "b"
_MODES = ("sum", "mean", "max")


class EmbeddingBag(Rule):
    """y[b, e] = sum, mean or maximum over the indices i of bag b of w[i, e]. Strategy: (table, indices, offsets)."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels v, e and b: that of the indices when bags are of equal length, else of the offsets."""
        counts_rows = bool(call.argument("scale_grad_by_freq", default=False))  # of the whole batch
        if counts_rows and call.argument("sparse", default=False):
            raise CaptureError(
                "embedding_bag(sparse=True, scale_grad_by_freq=True): torch has no such gradient; give one of both"
            )
        table, _, offsets, *weights = call.shapes
        bags, *rest = call.output_shapes
        is_even = _is_even(call)
        of_index: Labels = (BAGS,) if is_even else (None,)
        of_offsets: Labels = (BAGS,) if not is_even and offsets[0] == bags[0] else (None,)
        inputs = ((ROWS, "e"), of_index, of_offsets, *(of_index for _ in weights))
        sizes = {**sizes_of(((ROWS, "e"), table)), BAGS: bags[0]}
        whole: set[str] = set()
        if counts_rows:
            whole |= {ROWS, BAGS}
        if _MODES[call.argument("mode", 0)] == "max":
            whole.add(ROWS)
        if _reads_more(call.node):
            whole |= sizes.keys()
        others: tuple[Labels, ...] = tuple((None,) * len(shape) for shape in rest)
        return Form(inputs, (BAGS, "e"), sizes, frozenset(whole), others)

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Look up this rank's bags in its rows, then all-reduce."""
        if _reads_more(call.node):
            return self.local_call(call, build, inputs)
        rows, bags = split.get(ROWS, ()), split.get(BAGS, ())
        count = form.sizes[BAGS] // build.mesh.extent(bags)
        table, index, offsets, *weights = inputs
        if _is_even(call):  # the bags of every rank begin at the same places of its indices
            offsets, bags = build.call(aten.slice.Tensor, offsets, 0, 0, count), ()
        elif bags:
            offsets = build.collective(Collective("gather", bags, 0), offsets)
        if not rows and not bags:
            local = self.local_call(call, build, (table, index, offsets, *weights))
            return build.pack({0: build.call(operator.getitem, local, 0)})
        found = build.call(
            bag_own_rows,
            table,
            index,
            offsets,
            weights[0] if weights else None,
            build.place(),
            mesh_shape=build.mesh.shape,
            rows=rows,
            bags=bags,
            size=form.sizes[ROWS],
            count=count,
            mode=_MODES[call.argument("mode", 0)],
            has_end=bool(call.argument("include_last_offset", default=False)),
            padding_idx=call.argument("padding_idx"),
            sparse=bool(call.argument("sparse", default=False)),
        )
        return build.pack({0: build.sum_over(found, summed_axes(form, split))})


def _is_even(call: OperatorCall) -> bool:
    """Return whether the offsets are those of a two-dimensional input: 0, length, 2 * length, ..."""
    offsets, length, count = call.tensors[2], call.shapes[1][0], call.output_shape[0]
    if offsets.target is not aten.arange.start_step or call.argument("include_last_offset", default=False):
        return False
    return count > 0 and offsets.args[:3] == (0, length, length // count) and length % count == 0


def _reads_more(node: fx.Node) -> bool:
    """Return whether anybody reads another result than the bags: they are about the whole batch."""
    return any(user.users and user.args[1] != 0 for user in node.users)


def bags_sparsely(node: fx.Node) -> bool:
    """Return whether a local operator is an embedding_bag whose table gets a gradient of rows alone."""
    if node.target is bag_own_rows:
        return bool(node.kwargs["sparse"])
    is_torchs = node.target in (aten.embedding_bag.default, aten.embedding_bag.padding_idx)
    return is_torchs and bool(operator_call(node).argument("sparse"))


def bag_own_rows(
    table: Tensor,
    index: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    place: Tensor,
    *,
    mesh_shape: tuple[int, ...],
    rows: Axes,
    bags: Axes,
    size: int,
    count: int,
    mode: str,
    has_end: bool,
    padding_idx: int | None,
    sparse: bool,
) -> Tensor:
    """Return this rank's bags of its rows, (count, e): a part of the sum over the axes that cut the rows.

    Args:
        index, weights: of all bags that `offsets` begin.
        rows, bags: axes that cut the table's rows, and the bags.
        size: rows of the whole table.
        count: bags of this rank.
        has_end: the last offset is the end of the last bag.
        sparse: the gradient has the rows that are looked up here and no others.
    """
    begins = offsets if has_end else torch.cat([offsets, offsets.new_full((1,), index.shape[0])])
    if bags:
        index, begins, weights = _own_bags(index, begins, weights, first_of_part(place, mesh_shape, bags, count), count)
    if not rows:
        return F.embedding_bag(
            index, table, begins, mode=mode, per_sample_weights=weights, include_last_offset=True,
            padding_idx=padding_idx, sparse=sparse,
        )  # fmt: skip
    local, is_elsewhere = own_rows(index, place, mesh_shape, rows, table.shape[0], size)
    is_left_out = is_elsewhere if padding_idx is None else is_elsewhere | (index == padding_idx)
    shares = table.new_ones(index.shape) if weights is None else weights
    if mode == "mean":
        shares = shares / _sizes_of_bags(index, begins, padding_idx).to(table.dtype)
    if sparse and not isinstance(index, FakeTensor):  # of which nobody knows how many rows lie here
        kept = (~is_left_out).nonzero().squeeze(1)
        begins = torch.searchsorted(kept, begins)
        local, shares = local.index_select(0, kept), shares.index_select(0, kept)
    else:
        shares, sparse = shares.masked_fill(is_left_out, 0), False
    return F.embedding_bag(
        local, table, begins, mode="sum", per_sample_weights=shares, include_last_offset=True, sparse=sparse
    )


def _own_bags(
    index: Tensor, begins: Tensor, weights: Tensor | None, first: int, count: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the indices of `count` bags, where each begins among them and the last ends, and their weights."""
    is_rising = (begins[1:] >= begins[:-1]).all() & (begins[0] == 0)
    torch._assert_async(is_rising, "offsets of embedding_bag must rise from 0: they are those of the whole batch")
    begins = begins[first : first + count + 1]
    if isinstance(index, FakeTensor):  # shapes alone are asked for
        return index, begins, weights
    own = slice(int(begins[0]), int(begins[-1]))
    return index[own], begins - begins[0], None if weights is None else weights[own]


def _sizes_of_bags(index: Tensor, begins: Tensor, padding_idx: int | None) -> Tensor:
    """Return for every index how many of its bag count: all that are not padding; at least 1."""
    counted = torch.ones_like(index) if padding_idx is None else (index != padding_idx).to(index.dtype)
    bag = torch.searchsorted(begins, torch.arange(index.shape[0], device=index.device), right=True) - 1
    totals = counted.new_zeros(begins.shape[0]).index_add(0, bag, counted)
    return totals.index_select(0, bag).clamp_min(1)
