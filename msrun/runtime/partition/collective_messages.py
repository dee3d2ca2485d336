"""Messages: what a collective of a partitioned graph puts on the wire, told from shapes alone.

The figures are those that the run-time counter (`execute.transfers`) will show: number of operations, and bytes of
their input on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import torch

from msrun.runtime.cost.operators import TensorSpec
from msrun.runtime.sharding.collective import Collective, Kind
from msrun.runtime.sharding.layout import Axes, Mesh

Shape = Sequence[int]


@dataclass(frozen=True)
class Message:
    """One operation of one rank."""

    operation: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, halo, ring, to_host or to_device: the counter's words."""
    bytes: int
    """Of the input on this rank."""
    ranks: int

    def __str__(self) -> str:
        by = f" by {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.operation} of {self.bytes} B{by}"


@dataclass(frozen=True)
class CollectiveTraffic:
    """One collective of the program, with what it moves for one copy of the batch."""

    text: str
    forward: Message | None
    backward: Message | None
    """Of the gradient; None too where no gradient comes back."""

    def __str__(self) -> str:
        moved = {"forward": self.forward, "backward": self.backward}
        return f"{self.text}: {', '.join(f'{way} {m}' for way, m in moved.items() if m is not None) or 'moves nothing'}"

    @property
    def messages(self) -> list[Message]:
        """What it moves in one training step."""
        return [message for message in (self.forward, self.backward) if message is not None]


@dataclass(frozen=True)
class Totals:
    """Operations added up."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, messages: Iterable[Message]) -> Totals:
        """Add up messages by operation."""
        calls: dict[str, int] = {}
        total: dict[str, int] = {}
        for message in messages:
            calls[message.operation] = calls.get(message.operation, 0) + 1
            total[message.operation] = total.get(message.operation, 0) + message.bytes
        return cls(calls, total)

    def __str__(self) -> str:
        parts = [f"{count} {name} with {self.bytes[name]} B" for name, count in sorted(self.calls.items())]
        return ", ".join(parts) or "nothing"


def result_shape(collective: Collective, shape: Shape, mesh: Mesh) -> tuple[int, ...]:
    """Return the local shape that a collective makes of a local shape."""
    parts = mesh.extent(collective.axes)
    result = list(shape)
    match collective.kind:
        case "gather" | "gather_enter":
            result[collective.dim] *= parts
        case "slice" | "reduce_scatter":
            result[collective.dim] //= parts
        case "exchange":
            result[collective.dim] //= parts
            result[collective.from_dim] *= parts
        case "halo":
            assert collective.window is not None
            result[collective.dim] = collective.window.length
        case "all_reduce" | "enter" | "ring" | "to_host" | "to_device":
            pass
        case _:
            assert_never(collective.kind)
    return tuple(result)


OPERATIONS: dict[Kind, tuple[str, str]] = {
    "enter": ("", "all_reduce"),
    "slice": ("", "all_gather"),
    "gather": ("all_gather", ""),
    "gather_enter": ("all_gather", "reduce_scatter"),
    "all_reduce": ("all_reduce", ""),
    "reduce_scatter": ("reduce_scatter", "all_gather"),
    "exchange": ("all_to_all", "all_to_all"),
    "to_host": ("to_host", "to_device"),
    "to_device": ("to_device", "to_host"),
}
"""collective -> what moves forward, and what of the gradient on the way back; "": nothing."""


@dataclass(frozen=True)
class LocalCollective:
    """One collective on the values of one rank."""

    collective: Collective
    value: TensorSpec
    """Its input."""
    has_gradient: bool = False
    """Whether a gradient comes back through it."""

    def messages(self, mesh: Mesh, rank: int) -> tuple[Message | None, Message | None]:
        """Return what moves forward and on the way back."""
        forward = self._message(mesh, rank, is_gradient=False)
        return forward, self._message(mesh, rank, is_gradient=True) if self.has_gradient else None

    def _message(self, mesh: Mesh, rank: int, *, is_gradient: bool) -> Message | None:
        collective, shape, dtype = self.collective, self.value.shape, self.value.dtype
        if collective.kind == "halo":
            return _halo(collective, shape, dtype, mesh, rank, is_gradient=is_gradient)
        if collective.kind == "ring":
            return _ring(collective, shape, dtype, mesh, is_gradient=is_gradient)
        operation = OPERATIONS[collective.kind][is_gradient]
        sent = result_shape(collective, shape, mesh) if is_gradient else shape
        size = math.prod(sent) * dtype.itemsize
        return Message(operation, size, mesh.extent(collective.axes)) if operation else None

    def copies(self, mesh: Mesh) -> tuple[list[int], list[int]]:
        """Return the bytes of the copies beside the messages, forward and on the way back.

        Parts of an inner dimension do not lie in a row: they are put together after they have arrived, and into rows
        before they leave.
        """
        kind, shape, own = self.collective.kind, self.value.shape, self.value.nbytes
        dims = (self.collective.dim, self.collective.from_dim) if kind == "exchange" else (self.collective.dim,)
        inner = [dim for dim in dims if math.prod(shape[:dim]) > 1]
        forward, backward = list[int](), list[int]()
        if kind == "exchange":
            forward = backward = [own for _ in inner]
        elif kind in ("gather", "gather_enter", "reduce_scatter", "slice"):
            result = math.prod(result_shape(self.collective, shape, mesh)) * self.value.dtype.itemsize
            copies = [max(own, result) for _ in inner]
            forward, backward = [] if kind == "slice" else copies, [] if kind == "gather" else copies
        return forward, backward if self.has_gradient else []


def gathers_of_parameter(nbytes: int, shard_axes: Axes, mesh: Mesh) -> Message:
    """Return what gathers parameters before their use.

    Args:
        nbytes: of the parts that this rank stores.
        shard_axes: axes by which optimizer parallel cuts them.
    """
    return Message("all_gather", nbytes, mesh.extent(shard_axes))


def sums_of_gradient(nbytes: int, shard_axes: Axes, partial_axes: Axes, mesh: Mesh) -> list[tuple[Message, Axes]]:
    """Return what sums the gradients of parameters and cuts them to the parts at rest, with the axes of each message.

    Args:
        nbytes: of the gradients of the parts that this rank stores.
        partial_axes: axes along which the gradients are partial sums.
    """
    if not shard_axes:
        return [(Message("all_reduce", nbytes, mesh.extent(partial_axes)), partial_axes)] if partial_axes else []
    same = tuple(axis for axis in shard_axes if axis not in partial_axes)
    summed = tuple(axis for axis in shard_axes if axis in partial_axes)
    rest = tuple(axis for axis in partial_axes if axis not in shard_axes)
    if shard_axes != same + summed:
        size = nbytes * mesh.extent(shard_axes)
        return [(Message("all_reduce", size, mesh.extent((*summed, *rest))), (*summed, *rest))]
    sums = []
    if summed:
        sums.append((Message("reduce_scatter", nbytes * mesh.extent(summed), mesh.extent(summed)), summed))
    if rest:
        sums.append((Message("all_reduce", nbytes, mesh.extent(rest)), rest))
    return sums


def _ring(collective: Collective, shape: Shape, dtype: torch.dtype, mesh: Mesh, *, is_gradient: bool) -> Message:
    """Return what this rank sends of its keys and values, and of others that it passes on."""
    ranks = mesh.extent(collective.axes)
    assert collective.ring is not None
    wide = max(1, 4 // dtype.itemsize)  # gradients of 16 bits travel in float32
    sent = collective.ring.elements(math.prod(shape), ranks, is_gradient=is_gradient, gradient_bytes=wide)
    return Message("ring", sent * dtype.itemsize, ranks)


def _halo(
    collective: Collective, shape: Shape, dtype: torch.dtype, mesh: Mesh, rank: int, *, is_gradient: bool
) -> Message:
    """Return what this rank sends of its part, or of its window's gradient, to the others."""
    window, count, own = collective.window, mesh.extent(collective.axes), mesh.index(rank, collective.axes)
    assert window is not None
    others = [other for other in range(count) if other != own]
    spans = [window.overlap(own, o, count) if is_gradient else window.overlap(o, own, count) for o in others]
    rows = sum(end - begin for begin, end in spans)
    row = math.prod(size for dim, size in enumerate(shape) if dim != collective.dim)
    return Message("halo", rows * row * dtype.itemsize, count)
