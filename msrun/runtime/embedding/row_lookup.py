"""Looking rows up in a table of which this rank has a part, with a gradient of the rows that were looked up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.embedding.exchange import Requests
from msrun.runtime.embedding.slices import TableSlices
from msrun.runtime.execute.plain_tensors import plain
from msrun.runtime.execute.row_gradients import row_gradient, start_row_sum
from msrun.runtime.groups import axes_group
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.operators.table_lookup import number_lookup


@dataclass(frozen=True)
class _Ways:
    """How rows and gradients travel in one lookup."""

    group: dist.ProcessGroup | None
    """Ranks that exchange rows; None: the table is whole here."""
    sums_over: dist.ProcessGroup | None = None
    """Ranks over which the gradient of a whole table is added up at once; None: later, or there are no others."""
    factor: float = 1.0
    """Of the gradient."""
    gives_gradient: bool = True
    """False where the indices are copies of another rank's, which gives theirs."""


class RowLookup:
    """Looks up in one table. Owned by an EmbeddingLookup.

    Args:
        is_sparse: the gradient is one of rows; else a whole one of this rank's part.
    """

    def __init__(self, slices: TableSlices, *, is_sparse: bool) -> None:
        self.slices = slices
        self.width = slices.width
        self.cut_dimension = slices.dimension
        self.is_sparse = is_sparse
        self.number = number_lookup(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowLookup:
        return RowLookup(self.slices, is_sparse=self.is_sparse)

    def check(self, index: Tensor) -> None:
        """Refuse what cannot be looked up, whatever its values.

        Raises:
            StrategyError: indices that are no whole numbers, or a table that was made before `init()`.
        """
        if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise StrategyError(f"EmbeddingLookup: indices of {index.dtype}; give whole numbers, such as torch.int64")
        ranks = world.get_group_size()
        if self.slices.ranks != ranks:
            raise StrategyError(
                f"EmbeddingLookup was made for {self.slices.ranks} ranks and is called by {ranks}: call init() before "
                "you build the network"
            )

    def run(self, table: Tensor, index: Tensor, mesh: Mesh, *, gives_gradient: bool) -> Tensor:
        """Look up as an operator of a captured graph, which adds the gradients of whole tables up by itself."""
        group = None if self.cut_dimension is None else axes_group(mesh, mesh.axes)
        return self._apply(table, index, _Ways(group, gives_gradient=gives_gradient))

    def run_alone(self, table: Tensor, index: Tensor) -> Tensor:
        """Look up in a whole table, for this rank alone."""
        return self._apply(table, index, _Ways(None))

    def run_with_others(self, table: Tensor, index: Tensor, mesh: Mesh) -> Tensor:
        """Look up in a network that runs without capture. The ranks of the mesh call it together.

        The gradient is the mean over the ranks of those of their own losses, as torch's DDP makes it.
        """
        group = axes_group(mesh, mesh.axes)
        factor = 1.0 / self.slices.ranks
        if self.cut_dimension is None:
            return self._apply(
                table, index, _Ways(None, group if self.is_sparse else None, factor if self.is_sparse else 1.0)
            )
        return self._apply(table, index, _Ways(group, factor=factor))

    def _apply(self, table: Tensor, index: Tensor, ways: _Ways) -> Tensor:
        self.check(index)
        found: Tensor = _LookUp.apply(table, index, self, ways)
        return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, lookup: RowLookup, ways: _Ways) -> Tensor:
        part = plain(table)
        flat = index.detach().reshape(-1).to(part.device, torch.int64)
        known, unique, place = _sort_out(flat, lookup.slices.rows)
        ctx.requests = None if ways.group is None else Requests(lookup.slices, unique, ways.group)
        if ctx.requests is None:
            rows = part.index_select(0, unique)
        else:
            rows = ctx.requests.fetch(lambda asked: part.index_select(0, asked))
        found = rows.index_select(0, place)
        if known is not None:
            found = found.new_zeros(flat.shape[0], lookup.width).index_copy_(0, known, found)
        ctx.lookup, ctx.ways, ctx.shape = lookup, ways, part.shape
        ctx.known, ctx.unique, ctx.place = known, unique, place
        return found.view(*index.shape, lookup.width).to(index.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ways: _Ways = ctx.ways
        given = gradient.reshape(-1, ctx.lookup.width).to(ctx.unique.device)
        given = given if ctx.known is None else given.index_select(0, ctx.known)
        sums = given.new_zeros(ctx.unique.shape[0], ctx.lookup.width)
        if ways.gives_gradient:
            sums.index_add_(0, ctx.place, given)
        if ways.factor != 1.0:
            sums *= ways.factor
        rows, values = ctx.unique, sums
        if ctx.requests is not None:
            rows, values = ctx.requests.asked, ctx.requests.give_back(sums)
        if not ctx.lookup.is_sparse:
            return values.new_zeros(ctx.shape).index_add_(0, rows, values), None, None, None
        of_rows = row_gradient(rows, values, ctx.shape)
        if ways.sums_over is not None:
            of_rows = start_row_sum(of_rows, ways.sums_over).wait()
        return of_rows, None, None, None


def _sort_out(flat: Tensor, rows: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return which indices name a row (None: all), the rows that they name, ascending, and each one's place there.

    Raises:
        StrategyError: a negative index.
    """
    known = None
    if flat.numel():
        low, high = torch.aminmax(flat)
        if low < 0:
            raise StrategyError(
                f"EmbeddingLookup: index {int(low)} is negative; give 0 to {rows - 1}, or {rows} and above for zeros"
            )
        if high >= rows:
            known = (flat < rows).nonzero().squeeze(1)
            flat = flat.index_select(0, known)
    unique, place = torch.unique(flat, return_inverse=True)
    return known, unique, place
