"""Collective: one of a partitioned graph, as data; `execute/transfers.py` runs it.

Every collective of a partitioned graph is one `Collective`: what it does to a value on the way forward and to the
gradient on the way back. The pairs follow from one convention: the gradient of a tensor has the tensor's own layout.

    kind            forward          backward
    all_reduce      all-reduce       -                  partial sums become the whole
    enter           -                all-reduce         copies are used for different parts of the work
    gather          all-gather       slice
    gather_enter    all-gather       reduce-scatter     gather, then enter
    slice           slice            all-gather
    reduce_scatter  reduce-scatter   all-gather         all_reduce, then slice
    exchange        all-to-all       all-to-all
    halo            all-to-all       all-to-all         borders of neighbours' parts; their gradients are added
    ring            all-to-all       all-to-all         keys and values passed round inside an attention
    to_host         copy to host     copy to device     between the memories of one rank, over no axes
    to_device       copy to device   copy to host
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from msrun.runtime.sharding.layout import Axes


@dataclass(frozen=True)
class Window:
    """The windows of all ranks on one dimension."""

    size: int
    """Of the whole dimension."""
    step: int
    offset: int
    length: int
    fill: float = 0.0

    def start(self, index: int) -> int:
        """Return the first row that rank `index` reads."""
        return self.offset + index * self.step

    def overlap(self, reader: int, owner: int, count: int) -> tuple[int, int]:
        """Return [begin, end) of the rows that `reader` reads and `owner` of `count` ranks holds; empty if equal."""
        part = self.size // count
        begin = max(self.start(reader), owner * part)
        return begin, max(begin, min(self.start(reader) + self.length, (owner + 1) * part))


@dataclass(frozen=True)
class Message:
    """What one rank sends to each rank of its group, and what it gets."""

    flat: Tensor
    send_sizes: list[int]
    receive_shapes: list[tuple[int, ...]]

    @property
    def receive_sizes(self) -> list[int]:
        """Numbers of elements from each rank."""
        return [math.prod(shape) for shape in self.receive_shapes]

    def pieces(self, received: Tensor) -> list[Tensor]:
        """Cut what was received."""
        parts = received.split(self.receive_sizes)
        return [part.view(shape) for part, shape in zip(parts, self.receive_shapes, strict=True)]


def window_message(value: Tensor, dim: int, window: Window, index: int, count: int) -> Message:
    """Return what rank `index` sends of its part for the windows of the others."""
    lent, read = _borders(window, index, count)
    return _message(value, dim, lent, index * (window.size // count), read)


def join_window(value: Tensor, received: Sequence[Tensor], dim: int, window: Window, index: int, count: int) -> Tensor:
    """Return the window of rank `index`: fill, pieces of the ranks before, of its own part, of those behind, fill."""
    pieces = list(received)
    pieces[index] = _rows(value, dim, window.overlap(index, index, count), index * (window.size // count))
    first, last = window.start(index), window.start(index) + window.length
    below = min(max(-first, 0), window.length)
    above = min(max(last - window.size, 0), window.length)
    fills = [value.new_full(_resized(value, dim, rows), window.fill) for rows in (below, above)]
    return torch.cat([fills[0], *pieces, fills[1]], dim)


def gradient_message(grad: Tensor, dim: int, window: Window, index: int, count: int) -> Message:
    """Return what rank `index` sends of its window's gradient back to the owners of the rows."""
    lent, read = _borders(window, index, count)
    return _message(grad, dim, read, window.start(index), lent)


def add_gradients(grad: Tensor, received: Sequence[Tensor], dim: int, window: Window, index: int, count: int) -> Tensor:
    """Return the gradient of the part of rank `index`: its own window's and those of the others, in rank order."""
    part = window.size // count
    total = grad.new_zeros(_resized(grad, dim, part))
    for other, piece in enumerate(received):
        begin, end = window.overlap(other, index, count)
        if end > begin:
            own = grad.narrow(dim, begin - window.start(index), end - begin) if other == index else piece
            total.narrow(dim, begin - index * part, end - begin).add_(own)
    return total


Span = tuple[int, int]
"""Rows of the whole dimension, the end not included."""


def _borders(window: Window, index: int, count: int) -> tuple[list[Span], list[Span]]:
    """Return the rows of its part that rank `index` lends to each other one, and those that it reads of theirs."""
    lent = [window.overlap(other, index, count) for other in range(count)]
    read = [window.overlap(index, other, count) for other in range(count)]
    lent[index] = read[index] = (0, 0)
    return lent, read


def _rows(value: Tensor, dim: int, span: Span, first: int) -> Tensor:
    """Return some rows of a tensor that begins with row `first`."""
    begin, end = span
    return value.narrow(dim, begin - first if end > begin else 0, end - begin)


def _message(value: Tensor, dim: int, sent: Sequence[Span], first: int, wanted: Sequence[Span]) -> Message:
    pieces = [_rows(value, dim, span, first) for span in sent]
    return Message(
        torch.cat([piece.reshape(-1) for piece in pieces]),
        [piece.numel() for piece in pieces],
        [_resized(value, dim, end - begin) for begin, end in wanted],
    )


def _resized(like: Tensor, dim: int, rows: int) -> tuple[int, ...]:
    return (*like.shape[:dim], rows, *like.shape[dim + 1 :])


Kind = Literal[
    "all_reduce",
    "enter",
    "gather",
    "gather_enter",
    "slice",
    "reduce_scatter",
    "exchange",
    "halo",
    "ring",
    "to_host",
    "to_device",
]


@dataclass(frozen=True)
class Ring:
    """What attention passes round while it computes: the keys and values of one rank after the other."""

    heads: int
    """Of the queries on one rank."""
    width: int
    """Of a query and a key."""
    key_heads: int
    value_width: int
    is_balanced: bool
    """Causal: every rank computes for rows of the beginning and of the end, which are exchanged first."""

    def elements(self, sent: int, ranks: int, *, is_gradient: bool, gradient_bytes: int) -> int:
        """Return the elements that a rank sends, of the type of the keys.

        Args:
            sent: elements of its keys and values.
            gradient_bytes: size of an element of the gradients that travel, divided by that of a key.
        """
        rows = sent // (self.key_heads * (self.width + self.value_width))
        query, result = rows * self.heads * self.width, rows * self.heads * self.value_width
        to_balance = 0 if not self.is_balanced else query + sent + result
        if not is_gradient:
            return (ranks - 1) * sent + to_balance
        delta = rows * self.heads * gradient_bytes if self.is_balanced else 0
        return (ranks - 1) * sent + ranks * sent * gradient_bytes + to_balance + delta


@dataclass(frozen=True)
class Collective:
    """One collective of a partitioned graph."""

    kind: Kind
    axes: Axes
    dim: int = 0
    from_dim: int = 0
    window: Window | None = None
    """What each rank reads; of a halo."""
    ring: Ring | None = None

    def __str__(self) -> str:
        if self.is_copy:
            return self.kind
        where = "" if self.kind in ("all_reduce", "enter") else f" dim {self.dim}"
        if self.kind == "exchange":
            where = f" dim {self.from_dim} -> {self.dim}"
        if self.window is not None:
            where += f", {self.window.length} rows from {self.window.offset} every {self.window.step}"
        if self.ring is not None:
            where += f", the next keys and values travel while a block is computed{self._balanced}"
        return f"{self.kind}{where} over axes {','.join(map(str, self.axes))}"

    @property
    def _balanced(self) -> str:
        return ", causal work balanced" if self.ring is not None and self.ring.is_balanced else ""

    @property
    def is_copy(self) -> bool:
        """True when it moves between the memories of this rank alone."""
        return self.kind in ("to_host", "to_device")

    @property
    def is_local(self) -> bool:
        """True when nothing moves on the way forward."""
        return self.kind in ("enter", "slice")

    @property
    def moves_backward(self) -> bool:
        """True when data moves on the way back."""
        return self.kind not in ("all_reduce", "gather")
