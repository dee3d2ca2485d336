"""How the ranks share out a table: not at all, by rows, by columns, or by the rows of given fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msrun.errors import StrategyError, near_miss

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
