"""Which rows of a parameter are on which server. Pure; all ranks decide the same.

A table whose rows are looked up has row r on server r % servers: tables are often sorted by how frequent their rows
are, and so every server gets its share of the frequent ones. Other parameters are cut into ranges of rows; small ones
stay whole, each on the next server.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALL_BYTES = 1 << 16
"""A parameter of at most so much is not cut: another message costs more."""
PIECE_BYTES = 1 << 28
"""No piece of a cut parameter is larger, but for single rows; a message holds at least one."""

VALUE = "value"
"""The name of a piece's values among the tensors of its state."""


@dataclass(frozen=True)
class Piece:
    """The rows `range(start, stop, step)` of a parameter, on one server."""

    server: int
    number: int
    """Among the pieces of the parameter."""
    start: int
    stop: int
    step: int = 1

    @property
    def rows(self) -> range:
        """Its rows by their numbers in the whole parameter."""
        return range(self.start, self.stop, self.step)

    def of(self, whole: Tensor) -> Tensor:
        """Return its rows of a whole tensor with at least one dimension; a view."""
        return whole[self.start : self.stop : self.step]

    def overlap(self, begin: int, end: int) -> range:
        """Return its own row numbers of those in `range(begin, end)` of the whole."""
        first = max(0, -((self.start - begin) // self.step))
        last = max(first, min(len(self.rows), -((self.start - min(end, self.stop)) // self.step)))
        return range(first, last)


def cut_table(rows: int, servers: int) -> tuple[Piece, ...]:
    """Return the pieces of a table whose rows are looked up."""
    return tuple(Piece(server, server, server, rows, servers) for server in range(min(rows, servers)))


def cut_rows(shape: Sequence[int], dtype: torch.dtype, servers: int, first_server: int) -> tuple[Piece, ...]:
    """Return the pieces of a parameter that is pulled whole; one without dimensions counts as one row."""
    rows = shape[0] if shape else 1
    size = math.prod(shape) * dtype.itemsize
    wanted = 1 if size <= SMALL_BYTES else max(servers, -(-size // PIECE_BYTES))
    count = max(1, min(wanted, rows))
    bounds = [number * rows // count for number in range(count + 1)]
    return tuple(
        Piece((first_server + number) % servers, number, bounds[number], bounds[number + 1]) for number in range(count)
    )


def number_rows(pieces: Sequence[Piece], rows: Tensor) -> Tensor:
    """Return numbers that order rows of the whole by piece, and within it: what is sent to one server is a slice."""
    step = pieces[0].step
    return rows if step == 1 else rows % step * len(pieces[0].rows) + rows // step


def count_numbers(pieces: Sequence[Piece]) -> int:
    """Return what all numbers of `number_rows` are below."""
    return pieces[0].step * len(pieces[0].rows) if pieces[0].step > 1 else pieces[-1].stop


def named_rows(pieces: Sequence[Piece], numbers: Tensor) -> Tensor:
    """Return the rows of the whole that have these numbers."""
    step, size = pieces[0].step, len(pieces[0].rows)
    return numbers if step == 1 else numbers % size * step + numbers // size


def split_numbers(pieces: Sequence[Piece], numbers: Tensor) -> list[tuple[Piece, slice, Tensor]]:
    """Return for each piece which of ascending numbers are its own, and its own row numbers of them."""
    first, step = pieces[0], pieces[0].step
    starts = [piece.start if step == 1 else number * len(first.rows) for number, piece in enumerate(pieces)]
    edges = [0, *torch.searchsorted(numbers, numbers.new_tensor(starts[1:])).tolist(), len(numbers)]
    parts = [slice(begin, end) for begin, end in itertools.pairwise(edges)]
    return [(piece, part, numbers[part] - start) for piece, part, start in zip(pieces, parts, starts, strict=True)]
