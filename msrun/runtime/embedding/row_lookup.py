"""Looking rows up in a table of which this rank has a part, with a gradient of the rows that were looked up."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.embedding.slices import TableSlices
from msrun.runtime.embedding.table_cache import TableCache
from msrun.runtime.execute.gradients import row_gradient, start_row_sum
from msrun.runtime.execute.transfers import start_row_exchange
from msrun.runtime.groups import axes_group
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.operators.table_lookup import number_lookup
from msrun.runtime.tensors.plain_tensors import plain


class RowSource(Protocol):
    """Where the rows of one lookup come from, and where their gradients go."""

    def number(self, rows: Tensor) -> Tensor:
        """Return numbers of the rows by which the source likes them ordered; one per row."""

    def fetch(self, numbers: Tensor, place: Tensor) -> Tensor:
        """Return the rows `numbers[place]` of the table: (k,) -> (k, width).

        Args:
            numbers: (n,) ascending, each once.
        """

    def give_back(self, numbers: Tensor, gradients: Tensor) -> Tensor:
        """Return the table's gradient, given those of the rows: (n,) and (n, width)."""


def look_up(table: Tensor, index: Tensor, source: RowSource) -> Tensor:
    """Return (.., width) rows of whole numbers of any shape, on their device; the gradient is that of `table`."""
    found: Tensor = _LookUp.apply(table, index, source)
    return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, source: RowSource) -> Tensor:  # noqa: ARG004 - has the gradient
        numbers, order = torch.sort(source.number(index.detach().reshape(-1).long()))
        is_new = numbers[1:] > numbers[:-1]
        if bool(is_new.all()):
            ranks = torch.arange(len(order), device=order.device)
        else:
            is_new = torch.cat([is_new.new_ones(1), is_new])
            numbers, ranks = numbers[is_new], is_new.cumsum(0) - 1
        place = torch.empty_like(order).index_copy_(0, order, ranks)
        ctx.source, ctx.numbers, ctx.order, ctx.place = source, numbers, order, place
        found = source.fetch(numbers, place).to(index.device)
        return found.view(*index.shape, found.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        given = gradient.reshape(-1, gradient.shape[-1])
        if len(ctx.numbers) == len(given):  # each row once: to select them is faster than to add them up
            sums = given.index_select(0, ctx.order)
        else:  # of an expanded one index_add_ is 7 times slower
            sums = given.new_zeros(len(ctx.numbers), given.shape[1]).index_add_(0, ctx.place, given.contiguous())
        return ctx.source.give_back(ctx.numbers, sums), None, None


class Requests:
    """The requests of one lookup. All ranks of the group make them together.

    Args:
        rows: numbers of the rows that this rank needs, ascending, each once.
    """

    def __init__(self, slices: TableSlices, rows: Tensor, group: dist.ProcessGroup) -> None:
        self._slices = slices
        self._group = group
        self._count = rows.shape[0]
        ranks = slices.ranks
        if slices.dimension == 0:
            edges = torch.searchsorted(rows, rows.new_tensor(slices.bounds)).tolist()
            self._sent = [end - begin for begin, end in itertools.pairwise(edges)]
        else:
            self._sent = [self._count] * ranks
            rows = rows.repeat(ranks)
        ones = [1] * ranks
        self._asked: list[int] = start_row_exchange(rows.new_tensor(self._sent), ones, ones, group).wait().tolist()
        asked = start_row_exchange(rows, self._sent, self._asked, group).wait()
        self.asked = asked - slices.bounds[dist.get_rank(group)] if slices.dimension == 0 else asked
        """Rows of this rank's part that the ranks ask for, in rank order."""

    def fetch(self, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rows that this rank needs: (rows, width).

        Args:
            read: gives rows of this rank's part.
        """
        found = start_row_exchange(read(self.asked), self._asked, self._sent, self._group).wait()
        if self._slices.dimension == 0:
            return found
        pieces = found.view(self._slices.ranks, self._count, found.shape[1]).transpose(0, 1)
        return pieces.reshape(self._count, self._slices.width)

    def give_back(self, gradients: Tensor) -> Tensor:
        """Return the gradients of the rows that this rank was asked for, given those of the rows that it needs."""
        if self._slices.dimension == 1:
            columns = self._slices.width // self._slices.ranks
            pieces = gradients.view(self._count, self._slices.ranks, columns).transpose(0, 1)
            gradients = pieces.reshape(self._slices.ranks * self._count, columns)
        return start_row_exchange(gradients, self._sent, self._asked, self._group).wait()


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
        cache: of rows of a whole table, on the device of the indices; None: there is none.
    """

    def __init__(self, slices: TableSlices, *, is_sparse: bool, cache: TableCache | None = None) -> None:
        self.slices = slices
        self.width = slices.width
        self.cut_dimension = slices.dimension
        self.is_sparse = is_sparse
        self.cache = cache
        self.number = number_lookup(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowLookup:
        return RowLookup(self.slices, is_sparse=self.is_sparse, cache=copy.deepcopy(self.cache, memo))

    def check(self, index: Tensor) -> None:
        """Refuse what cannot be looked up, whatever its values."""
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
        here, whole = tuple(plain(table).shape), (self.slices.rows, self.width)
        if here != whole:
            raise StrategyError(
                f'EmbeddingLookup: this rank has {here} of a table of {whole}, and parallel_mode="stand_alone" '
                'exchanges nothing: give slice_mode="batch_slice"'
            )
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
        return self.run_elsewhere(table, index, _Part(plain(table), self, ways))

    def run_elsewhere(self, table: Tensor, index: Tensor, source: RowSource) -> Tensor:
        """Look up in what a source has; the gradient is that of `table`."""
        self.check(index)
        known = _find_known(index, self.slices.rows)
        asked = index if known is None else index.reshape(-1).index_select(0, known)
        found = look_up(table, asked, source)
        if known is None:
            return found
        return found.new_zeros(index.numel(), self.width).index_copy(0, known, found).view(*index.shape, self.width)


class _Part:
    """This rank's part of a table, as the source of the rows of one lookup."""

    def __init__(self, part: Tensor, lookup: RowLookup, ways: _Ways) -> None:
        self._part, self._lookup, self._ways = part, lookup, ways
        self._requests: Requests | None = None

    def number(self, rows: Tensor) -> Tensor:
        return rows

    def fetch(self, rows: Tensor, place: Tensor) -> Tensor:
        device = rows.device
        rows = rows.to(self._part.device)
        if self._lookup.cache is not None:
            return self._lookup.cache.fetch(self._part, rows, device).index_select(0, place)
        if self._ways.group is None:  # each row once: it may go to another device
            return self._part.index_select(0, rows).to(device).index_select(0, place)
        self._requests = Requests(self._lookup.slices, rows, self._ways.group)
        found = self._requests.fetch(lambda asked: self._part.index_select(0, asked))
        return found.to(device).index_select(0, place)

    def give_back(self, rows: Tensor, gradients: Tensor) -> Tensor:
        ways = self._ways
        rows, values = rows.to(self._part.device), gradients.to(self._part.device)
        if not ways.gives_gradient:
            values = torch.zeros_like(values)
        if ways.factor != 1.0:
            values = values * ways.factor
        if self._requests is not None:
            rows, values = self._requests.asked, self._requests.give_back(values)
        if not self._lookup.is_sparse:
            return values.new_zeros(self._part.shape).index_add_(0, rows, values)
        of_rows = row_gradient(rows, values, self._part.shape)
        return of_rows if ways.sums_over is None else start_row_sum(of_rows, ways.sums_over).wait()


def _find_known(index: Tensor, rows: int) -> Tensor | None:
    """Return the places of the indices that name a row; None: all do."""
    if not index.numel():
        return None
    low, high = torch.aminmax(index)
    if low < 0:
        raise StrategyError(
            f"EmbeddingLookup: index {int(low)} is negative; give 0 to {rows - 1}, or {rows} and above for zeros"
        )
    return None if high < rows else (index.reshape(-1) < rows).nonzero().squeeze(1)
