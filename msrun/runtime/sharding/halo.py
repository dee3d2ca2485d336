"""Windows on a cut dimension: what a kernel that slides over it reads at the borders of its part.

Rank i of n owns rows [i * size / n, (i + 1) * size / n) and reads the window [offset + i * step, ... + length), which
may begin in the part of a rank before and end in that of a rank behind; rows outside the tensor are filled. All
windows have the same length, so the local program is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    part = window.size // count
    asked = [window.overlap(other, index, count) if other != index else (0, 0) for other in range(count)]
    wanted = [window.overlap(index, other, count) if other != index else (0, 0) for other in range(count)]
    sent = [value.narrow(dim, begin - index * part if end > begin else 0, end - begin) for begin, end in asked]
    return _message(sent, value, dim, wanted)


def join_window(value: Tensor, received: Sequence[Tensor], dim: int, window: Window, index: int, count: int) -> Tensor:
    """Return the window of rank `index`: fill, pieces of the ranks before, of its own part, of those behind, fill."""
    part = window.size // count
    begin, end = window.overlap(index, index, count)
    pieces = list(received)
    pieces[index] = value.narrow(dim, begin - index * part if end > begin else 0, end - begin)
    first, last = window.start(index), window.start(index) + window.length
    below = min(max(-first, 0), window.length)
    above = min(max(last - window.size, 0), window.length)
    fills = [value.new_full(_resized(value, dim, rows), window.fill) for rows in (below, above)]
    return torch.cat([fills[0], *pieces, fills[1]], dim)


def gradient_message(grad: Tensor, dim: int, window: Window, index: int, count: int) -> Message:
    """Return what rank `index` sends of its window's gradient back to the owners of the rows."""
    read = [window.overlap(index, other, count) if other != index else (0, 0) for other in range(count)]
    lent = [window.overlap(other, index, count) if other != index else (0, 0) for other in range(count)]
    start = window.start(index)
    sent = [grad.narrow(dim, begin - start if end > begin else 0, end - begin) for begin, end in read]
    return _message(sent, grad, dim, lent)


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


def _message(sent: Sequence[Tensor], like: Tensor, dim: int, wanted: Sequence[tuple[int, int]]) -> Message:
    return Message(
        torch.cat([piece.reshape(-1) for piece in sent]),
        [piece.numel() for piece in sent],
        [_resized(like, dim, end - begin) for begin, end in wanted],
    )


def _resized(like: Tensor, dim: int, rows: int) -> tuple[int, ...]:
    return (*like.shape[:dim], rows, *like.shape[dim + 1 :])
