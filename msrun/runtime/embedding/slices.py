"""How the ranks share out a table, and its first values: the same whoever makes them, so each makes its own part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import StrategyError, near_miss
from msrun.runtime import world
from msrun.runtime.nn.random_stream import Box, DrawKey, Source
from msrun.runtime.progress import waiting_in

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
