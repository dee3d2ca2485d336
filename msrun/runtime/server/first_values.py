"""First values of a table that the servers make: those of the lines that made it on the worker, which never has it.

torch draws the elements of a tensor in their order, normal ones 16 at a time: blocks whose elements are a multiple of
16, drawn one after the other with one generator, have the bits of the whole (a test compares them). Every server draws
all blocks and keeps its own rows. Rows of an EmbeddingLookup have numbers of their own, which need no generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime.embedding.initial_values import TableFill, fill_part
from msrun.runtime.embedding.slices import TableSlices
from msrun.runtime.nn.deferred_init import make_elsewhere
from msrun.runtime.nn.tape import Entry, Reference
from msrun.runtime.server.pieces import Piece

BLOCK = 1 << 22
"""Elements that are drawn at once."""
BY_ROW = "EmbeddingLookup"
"""Kind of the values of an EmbeddingLookup: `args` are its word or number, and the seed."""
IN_ORDER = ("normal_", "uniform_")
"""Kinds that need a generator; methods of Tensor."""
EACH = ("zero_", "fill_", "mul_", "add_", "sub_", "div_")
"""Kinds that treat every element alike; methods of Tensor."""


@dataclass
class Fill:
    """One line that gave a table values: what servers do for it, one after the other."""

    kind: str
    args: list[Any]
    first: int
    """Rows of the whole table."""
    last: int
    generator_state: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """Before the line; of a kind that needs it."""

    def use_seed(self, seed: int) -> None:
        """Take the seed of numbers by row."""
        self.args[1:] = [seed]


def divert_fills(labels: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, list[Fill]]:
    """Let deferred tables be made by the servers; returns how. All ranks call it together.

    Args:
        labels: names the tables in errors.

    Raises:
        StrategyError: a line of its initialisation is none that the servers know.
    """
    fills: dict[nn.Parameter, list[Fill]] = {parameter: [] for parameter in labels}
    make_elsewhere({p: functools.partial(_divert, p, label, fills[p]) for p, label in labels.items()})
    return fills


def _divert(parameter: nn.Parameter, label: str, fills: list[Fill], entry: Entry) -> Callable[[], None] | None:
    """Note what a line does to a table; returns what stands in for its random numbers."""
    (rows, width), operator = parameter.shape, entry.operator
    if isinstance(operator, TableFill):
        found = Fill(BY_ROW, [operator.init], 0, rows)
        fills.append(found)
        kind = f"param_init={operator.init if isinstance(operator.init, str) else type(operator.init).__name__}"
        if not isinstance(operator.init, str | int | float):
            raise _unknown(label, kind)
        return lambda: found.use_seed(operator.seed())
    kind = operator._schema.name.removeprefix("aten::") if hasattr(operator, "_schema") else operator.__name__
    if "empty" in kind or getattr(operator, "is_view", False):
        return None
    target, *numbers = entry.args or (None,)
    is_plain = all(isinstance(number, int | float) for number in numbers) and not any(entry.kwargs.values())
    part = _rows_of(target, width) if kind in (*IN_ORDER, *EACH) and is_plain else None
    if part is None or (kind in IN_ORDER and part != (0, rows)):
        raise _unknown(label, kind)
    fills.append(Fill(kind, numbers, *part))
    return _Skip(fills[-1], width, parameter.dtype) if kind in IN_ORDER else None


def _unknown(label: str, kind: str) -> StrategyError:
    return StrategyError(
        f"set_param_ps(init_in_server=True): {label} gets values by {kind}, which servers do not know: use nn.init's "
        "normal_, uniform_, constant_, zeros_ or ones_ of all of it, or a word of EmbeddingLookup"
    )


def _rows_of(target: Any, width: int) -> tuple[int, int] | None:
    """Return first and last row of a view of whole rows; None of others."""
    if not isinstance(target, Reference):
        return None
    strides = torch.empty(target.size, device="meta").stride()
    count = torch.Size(target.size).numel()
    if target.stride != strides or target.offset % width or count % width:
        return None
    return target.offset // width, (target.offset + count) // width


@dataclass
class _Skip:
    """What the replay of a tape calls for a line: the generator goes on as if it had drawn the table."""

    fill: Fill
    width: int
    dtype: torch.dtype

    def __call__(self) -> None:
        self.fill.generator_state = torch.get_rng_state()
        for first, last in blocks(self.fill, self.width):
            _draw(self.fill.kind, self.fill.args, (last - first, self.width), self.dtype, None)


def blocks(fill: Fill, width: int) -> Iterator[tuple[int, int]]:
    """Yield first and last row of what is drawn at once: all but the last have a multiple of 16 rows."""
    size = max(16, BLOCK // width // 16 * 16)
    count = max(1, (fill.last - fill.first) // size)
    yield from pairwise([*(fill.first + number * size for number in range(count)), fill.last])


def _draw(
    kind: str, args: list[Any], shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator | None
) -> Tensor:
    drawn: Tensor = getattr(torch.empty(shape, dtype=dtype), kind)(*args, generator=generator)
    return drawn


@torch.no_grad()
def make_rows(values: Tensor, piece: Piece, fill: Fill, rows: int) -> Tensor:
    """Give a piece its rows of those that a fill names, in place; returns the state of the generator after them.

    Args:
        values: of the piece's rows, (n, width).
        fill: of one block.
        rows: of the whole table.

    Raises:
        StrategyError: an unknown kind.
    """
    own, width = piece.overlap(fill.first, fill.last), values.shape[1]
    part = values[own.start : own.stop]
    if fill.kind in EACH:
        getattr(part, fill.kind)(*fill.args)
        return fill.generator_state
    generator, shape = torch.Generator(), (fill.last - fill.first, width)
    if fill.kind == BY_ROW:
        init, seed = fill.args
        place = (slice(fill.first, fill.last), slice(0, width))
        drawn = fill_part(torch.empty(shape, dtype=values.dtype), init, TableSlices(rows, width, 1, None), place, seed)
    elif fill.kind in IN_ORDER:
        generator.set_state(fill.generator_state)
        drawn = _draw(fill.kind, fill.args, shape, values.dtype, generator)
    else:
        raise StrategyError(f"{fill.kind}: servers know {BY_ROW}, {', '.join((*IN_ORDER, *EACH))}")
    begin = piece.start + own.start * piece.step - fill.first
    part.copy_(drawn[begin :: piece.step][: len(part)])
    return generator.get_state()
