"""EmbeddingLookup: a table of rows, looked up by number, on the host or on the device, over any number of ranks."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import StrategyError, near_miss
from msrun.runtime import world
from msrun.runtime.capture import marked_calls
from msrun.runtime.embedding.table_cache import RowCache, TableCache
from msrun.runtime.execute.gradients import row_gradient, start_row_sum
from msrun.runtime.execute.phase import runs_alone
from msrun.runtime.execute.placement import Placement, placements
from msrun.runtime.execute.transfers import start_row_exchange
from msrun.runtime.groups import axes_group
from msrun.runtime.nn.deferred_init import fill_when_made
from msrun.runtime.nn.mapped_tensors import map_file, note_file
from msrun.runtime.nn.random_stream import Box, DrawKey, Source
from msrun.runtime.optim.of_parts import watch_optimizers
from msrun.runtime.parts.part import become_part, exchange_state
from msrun.runtime.progress import waiting_in
from msrun.runtime.sharding.layout import Mesh, TensorLayout, build_mesh
from msrun.runtime.sharding.operators.table_lookup import OPERATOR, number_lookup
from msrun.runtime.tensors.plain_tensors import plain

MODES = ("batch_slice", "table_row_slice", "table_column_slice", "field_slice")


@dataclass(frozen=True)
class TableSlices:
    """The parts of a table of (rows, width)."""

    rows: int
    width: int
    ranks: int
    dimension: int | None
    """That is cut; None: the table is whole on every rank."""
    bounds: tuple[int, ...] = ()
    """Where the rows of each rank begin, and the end; of a table that is cut by rows."""

    def part(self, rank: int) -> tuple[slice, slice]:
        """Return which rows and columns a rank has."""
        if self.dimension == 0:
            return slice(*self.bounds[rank : rank + 2]), slice(0, self.width)
        size = self.width // self.ranks if self.dimension == 1 else self.width
        begin = rank * size if self.dimension == 1 else 0
        return slice(0, self.rows), slice(begin, begin + size)


def build_slices(mode: str, rows: int, width: int, manual_shapes: Sequence[int] | None, ranks: int) -> TableSlices:
    """Return how so many ranks share out a table; of one rank it is whole.

    Args:
        mode: batch_slice: whole on every rank. table_row_slice: equal numbers of rows, the last ranks may have fewer.
            table_column_slice: equal numbers of columns. field_slice: the rows of whole fields.
        manual_shapes: rows of every field, of field_slice. Their number is a multiple of the ranks; a rank has
            neighbouring fields.
    """
    if mode not in MODES:
        raise StrategyError(
            f"EmbeddingLookup(slice_mode={mode!r}): must be one of {', '.join(MODES)}{near_miss(mode, MODES)}"
        )
    fields = _check_fields(mode, rows, manual_shapes)
    if ranks == 1 or mode == "batch_slice":
        return TableSlices(rows, width, ranks, None)
    if mode == "table_column_slice":
        if width % ranks:
            raise StrategyError(
                f'EmbeddingLookup(slice_mode="table_column_slice"): {width} columns cannot be cut into {ranks} equal '
                "parts; give an embedding_size that the ranks divide, or another slice_mode"
            )
        return TableSlices(rows, width, ranks, 1)
    if mode == "table_row_slice":
        size = -(-rows // ranks)
        return TableSlices(rows, width, ranks, 0, tuple(min(rows, size * rank) for rank in range(ranks + 1)))
    if len(fields) % ranks:
        raise StrategyError(
            f"EmbeddingLookup(manual_shapes=...): {len(fields)} fields cannot be shared out among {ranks} ranks; give "
            f"a multiple of {ranks}"
        )
    each = len(fields) // ranks
    return TableSlices(rows, width, ranks, 0, tuple(sum(fields[: rank * each]) for rank in range(ranks + 1)))


def _check_fields(mode: str, rows: int, manual_shapes: Any) -> tuple[int, ...]:
    """Return the rows of every field; () in other modes than field_slice."""
    if mode != "field_slice":
        if manual_shapes is not None:
            raise StrategyError(
                f'EmbeddingLookup(manual_shapes=...): only slice_mode="field_slice" has it, not {mode!r}'
            )
        return ()
    is_tuple = isinstance(manual_shapes, tuple | list) and all(type(n) is int and n > 0 for n in manual_shapes)
    if not is_tuple or sum(manual_shapes) != rows:
        raise StrategyError(
            f'EmbeddingLookup(manual_shapes={manual_shapes!r}): slice_mode="field_slice" needs the number of rows of '
            f"every field, whole numbers above 0 whose sum is the vocab_size of {rows}"
        )
    return tuple(manual_shapes)


_BLOCK = 1 << 22
"""Elements of the table that are drawn at once, with numbers of their own."""
_WORDS: dict[str, Callable[[Source, torch.dtype, TableSlices], Tensor]] = {
    "normal": lambda source, dtype, _: source.normal(dtype).mul_(0.01),
    "uniform": lambda source, dtype, _: source.uniform(dtype).mul_(0.14).sub_(0.07),
    "xavier_uniform": lambda source, dtype, table: (
        source.uniform(dtype).mul_(2).sub_(1).mul_(math.sqrt(6 / (table.rows + table.width)))
    ),
    "xavier_normal": lambda source, dtype, table: source.normal(dtype).mul_(math.sqrt(2 / (table.rows + table.width))),
}
_NUMBERS = {"zeros": 0.0, "zero": 0.0, "ones": 1.0, "one": 1.0}


@dataclass(frozen=True)
class TableFill:
    """Gives a rank's part of a table its first values; see `fill_part`."""

    init: Any
    slices: TableSlices
    place: tuple[slice, slice]

    def __call__(self, part: Tensor) -> Tensor:
        """Fill the part; returns it. All ranks call it together."""
        return fill_part(part, self.init, self.slices, self.place, self.seed())

    def seed(self) -> int:
        """Return a number of torch's generator; rank 0's. All ranks call it together."""
        seed = torch.randint(1 << 62, (1,))
        if self.slices.ranks > 1:
            seed = seed.to(world.device())
            with waiting_in(lambda: "the seed of an EmbeddingLookup's table"):
                dist.broadcast(seed, 0)
        return int(seed)


def check_init(init: Any, table: TableSlices) -> None:
    """Refuse what tells no first values."""
    words = {**_WORDS, **_NUMBERS}
    if isinstance(init, str) and init.lower() not in words:
        raise StrategyError(
            f"EmbeddingLookup(param_init={init!r}): unknown{near_miss(init, words)}; give one of {', '.join(words)}, a "
            "number, a tensor, or a function that fills a tensor"
        )
    if isinstance(init, Tensor) and tuple(init.shape) != (table.rows, table.width):
        raise StrategyError(
            f"EmbeddingLookup(param_init=a tensor of {tuple(init.shape)}): must have the shape "
            f"({table.rows}, {table.width}) of the table"
        )


@torch.no_grad()
def fill_part(part: Tensor, init: Any, table: TableSlices, place: tuple[slice, slice], seed: int) -> Tensor:
    """Give a rank's part of a table its first values, in place; returns it.

    Args:
        part: of the sizes of `place`.
        init: normal (deviation 0.01), uniform (in [-0.07, 0.07)), xavier_uniform, xavier_normal, zeros, ones: words and
            values of MindSpore; a number; a tensor: the whole table; a function that fills a tensor in place, which
            gets the whole table.
        seed: equal on all ranks.
    """
    if isinstance(init, str) and init.lower() in _WORDS:
        draw = _WORDS[init.lower()]
        wide = part.dtype if part.dtype in (torch.float32, torch.float64) else torch.float32
        for number, box, rows in _blocks(table, place):
            source = Source(DrawKey(seed, 0), number, box, None, torch.device("cpu"))
            part[rows] = draw(source, wide, table).to(part.dtype)
    elif isinstance(init, str | int | float):
        part.fill_(_NUMBERS[init.lower()] if isinstance(init, str) else init)
    elif isinstance(init, Tensor):
        part.copy_(init[place])
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            whole = torch.empty(table.rows, table.width, dtype=part.dtype)
            init(whole)
        part.copy_(whole[place])
    return part


def _blocks(table: TableSlices, place: tuple[slice, slice]) -> Iterator[tuple[int, Box, slice]]:
    """Yield number of a block of the table's rows, what of it is in the part, and the part's rows that it fills."""
    rows, columns = place
    size = max(1, _BLOCK // table.width)
    for number in range(rows.start // size, -(-rows.stop // size)):
        first = number * size
        begin, end = max(first, rows.start), min(first + size, rows.stop)
        shape = (min(size, table.rows - first), table.width)
        box = Box(shape, (begin - first, columns.start), (end - begin, columns.stop - columns.start))
        yield number, box, slice(begin - rows.start, end - rows.start)


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
    """Of the gradient; 0 where the indices are copies of another rank's, which gives theirs."""


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
        return self._apply(table, index, _Ways(group, factor=float(gives_gradient)))

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


class EmbeddingLookup(nn.Module):
    """Rows of the table `embedding_table`, (vocab_size, embedding_size), by their numbers: MindSpore's EmbeddingLookup.

    An index of vocab_size or more gives zeros. The gradient has the rows that were looked up and no others, so
    LazyAdam, FTRL, torch's SGD, Adagrad and SparseAdam change these rows alone.

    In a world of several ranks, which `init()` has joined before the network is built, every rank makes and keeps only
    its part of the table. All ranks look up together, and each gets every row that it asks for once. In a loop without
    capture the gradient is the mean over the ranks of those of their own losses, as DDP's; in semi_auto it is that of
    the global loss. Checkpoints hold the whole table, for any number of ranks.

    Args:
        vocab_size, embedding_size: rows and columns of the table.
        param_init: first values: "normal" (deviation 0.01), "uniform" (in [-0.07, 0.07)), "xavier_uniform",
            "xavier_normal", "zeros", "ones", a number, the whole table as a tensor, or a function that fills a tensor.
            For words and numbers a rank makes only its own part; the values depend on torch's seed alone.
        target: "CPU": the table and its optimizer's step are on the host; "DEVICE": on the rank's device.
        slice_mode: how the ranks share out the table. "batch_slice": it is whole on every rank. "table_row_slice" and
            "table_column_slice": by equal numbers of rows or columns. "field_slice": by the rows of whole fields.
        manual_shapes: rows of every field, for "field_slice".
        max_norm: rows that are longer (2-norm) are scaled to it when they are looked up; the table stays.
        sparse: whether the gradient is one of rows; needed by target="CPU".
        vocab_cache_size: how many rows of a table on the host are also kept on the device, those looked up last; a row
            is copied again only when it has changed. `cache` counts. 0: none. The table has to be whole on every rank.
        dtype: of the table; None: torch's default.
        storage: a path: the table, and what msrun's LazyAdam and FTRL keep of it, are memory-mapped files of this name
            and the rank, made anew; None: memory. For tables larger than the host's memory.

    Raises:
        StrategyError: a value out of its range, or a table that the ranks cannot share out so.
    """

    embedding_table: nn.Parameter

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        param_init: Any = "normal",
        target: str = "CPU",
        slice_mode: str = "batch_slice",
        manual_shapes: Sequence[int] | None = None,
        max_norm: float | None = None,
        sparse: bool = True,
        vocab_cache_size: int = 0,
        dtype: torch.dtype | None = None,
        *,
        storage: str | None = None,
    ) -> None:
        super().__init__()
        _check(vocab_size, embedding_size, max_norm)
        _check_place(target, sparse, vocab_cache_size)
        self.vocab_size, self.embedding_size = vocab_size, embedding_size
        self.target, self.slice_mode, self.sparse = target, slice_mode, sparse
        self.vocab_cache_size = vocab_cache_size
        self.max_norm = None if max_norm is None else float(max_norm)
        ranks = world.get_group_size()
        slices = build_slices(slice_mode, vocab_size, embedding_size, manual_shapes, ranks)
        check_init(param_init, slices)
        device = torch.device("cpu") if target == "CPU" else world.device()
        rank = world.get_rank()
        place = slices.part(rank)
        file = None if storage is None else Path(f"{storage}.{rank}")
        part = _make_table(place, dtype or torch.get_default_dtype(), device, file)
        fill_when_made(part, TableFill(param_init, slices, place))
        self.embedding_table = nn.Parameter(part)
        if file is not None:
            note_file(self.embedding_table, file)
        if vocab_cache_size and slices.dimension is not None:
            raise StrategyError(
                f"EmbeddingLookup(vocab_cache_size={vocab_cache_size}, slice_mode={slice_mode!r}) on {ranks} ranks: "
                'rows of other ranks cannot be kept here; give vocab_cache_size=0 or slice_mode="batch_slice"'
            )
        cache = TableCache(vocab_size, vocab_cache_size) if vocab_cache_size else None
        if cache is not None:
            cache.watch(self.embedding_table)
        self._rows = RowLookup(slices, is_sparse=sparse, cache=cache)
        self._elsewhere: Callable[[], RowSource] | None = None
        self._cache_elsewhere: RowCache | None = None
        self._mesh = build_mesh(ranks)
        if ranks > 1 and (sparse or slices.dimension is not None):
            self._place(slices, rank)

    def _place(self, slices: TableSlices, rank: int) -> None:
        """Let the parameter know which part of the table it is."""
        cut = (
            [(), ()]
            if slices.dimension is None
            else [self._mesh.axes if dim == slices.dimension else () for dim in (0, 1)]
        )
        placement = Placement(
            "embedding_table",
            (slices.rows, slices.width),
            TensorLayout(tuple(cut)),
            (),
            f"{self.slice_mode} of EmbeddingLookup",
            self._mesh,
            rank,
            slices.ranks,
            bounds=slices.bounds if slices.rows % slices.ranks or self.slice_mode == "field_slice" else (),
            exchanges_rows=True,
        )
        watch_optimizers()
        if placement.is_cut:
            become_part(self.embedding_table, placement)
            exchange_state(self)
        else:
            placements[self.embedding_table] = placement

    def forward(self, indices: Tensor) -> Tensor:
        """Return the rows of whole numbers of any shape: (..) -> (.., embedding_size). All ranks call it together.

        Raises:
            StrategyError: a negative index, or indices that are no whole numbers.
        """
        found = self._look_up(indices)
        if self.max_norm is None:
            return found
        return found * (self.max_norm / torch.linalg.vector_norm(found, dim=-1, keepdim=True).clamp_min(self.max_norm))

    def _look_up(self, indices: Tensor) -> Tensor:
        if marked_calls.MSRUN_CAPTURING:
            return OPERATOR(self.embedding_table, indices, self._rows.number)
        if self._elsewhere is not None:
            return self._rows.run_elsewhere(self.embedding_table, indices, self._elsewhere())
        if self._rows.cache is not None:  # of a copy of this module, the parameter is another one
            self._rows.cache.watch(self.embedding_table)
        if world.get_group_size() == 1 or runs_alone.get():
            return self._rows.run_alone(self.embedding_table, indices)
        return self._rows.run_with_others(self.embedding_table, indices, self._mesh)

    @property
    def cache(self) -> RowCache | None:
        """The rows on the device, with its `hits`, `misses` and `copied_bytes`; None without vocab_cache_size."""
        return self._cache_elsewhere if self._rows.cache is None else self._rows.cache.rows

    def look_up_elsewhere(self, source: Callable[[], RowSource], cache: RowCache | None) -> None:
        """Let rows come from somewhere else from the next call on, such as parameter servers.

        Args:
            source: gives the source of the rows of one lookup.
            cache: where the rows that came last are kept; None: nowhere.

        Raises:
            StrategyError: the ranks have shared out the table among themselves.
        """
        slices = self._rows.slices
        if slices.dimension is not None:
            raise StrategyError(
                f"EmbeddingLookup(slice_mode={self.slice_mode!r}) on {slices.ranks} ranks cannot be on parameter "
                "servers, which cut the table by themselves: leave slice_mode out"
            )
        placements.pop(self.embedding_table, None)
        self._rows.cache = None
        self._elsewhere, self._cache_elsewhere = source, cache

    def extra_repr(self) -> str:
        """Return the settings for `print`."""
        return f"{self.vocab_size}, {self.embedding_size}, target={self.target!r}, slice_mode={self.slice_mode!r}"


def _check(vocab_size: Any, embedding_size: Any, max_norm: Any) -> None:
    for name, value in (("vocab_size", vocab_size), ("embedding_size", embedding_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise StrategyError(f"EmbeddingLookup({name}={value!r}): must be a whole number above 0")
    is_number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool) and max_norm > 0
    if max_norm is not None and not is_number:
        raise StrategyError(f"EmbeddingLookup(max_norm={max_norm!r}): must be a number above 0, or None")


def _check_place(target: Any, sparse: Any, cache: Any) -> None:
    if not isinstance(sparse, bool):
        raise StrategyError(f"EmbeddingLookup(sparse={sparse!r}): must be True or False")
    if target not in ("CPU", "DEVICE"):
        raise StrategyError(
            f"Attr 'target' of 'EmbeddingLookup' Op passed {target}, should be one of values in 'CPU', 'DEVICE'."
        )
    if not sparse and target == "CPU":
        raise StrategyError("When target is CPU, embedding_lookup must be sparse.")
    if type(cache) is not int or cache < 0:
        raise StrategyError(f"EmbeddingLookup(vocab_cache_size={cache!r}): must be a whole number, 0 or more")
    if cache and target == "DEVICE":
        raise StrategyError(
            f'EmbeddingLookup(vocab_cache_size={cache}, target="DEVICE"): the whole table is on the device; give 0, or '
            'target="CPU"'
        )


def _make_table(place: tuple[slice, slice], dtype: torch.dtype, device: torch.device, file: Path | None) -> Tensor:
    """Return the memory of a rank's part of a table, without values."""
    sizes = tuple(part.stop - part.start for part in place)
    table = torch.empty(sizes, dtype=dtype, device=device)
    if file is None:
        return table
    if table.is_meta or device.type != "cpu":
        where = "inside no_init_parameters()" if table.is_meta else f"on {device}"
        raise StrategyError(
            f"EmbeddingLookup(storage={str(file.with_suffix(''))!r}) {where}: files hold tables of the host and take "
            'no memory; leave storage out, or build it outside, with target="CPU"'
        )
    return map_file(file, sizes, dtype)
