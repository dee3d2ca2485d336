"""Collectives: started now, waited for later, with their gradients, counted.

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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime.graph.halo import Message, Window, add_gradients, gradient_message, join_window, window_message
from msrun.runtime.groups import axes_group
from msrun.runtime.layout import Axes, Mesh
from msrun.runtime.progress import begin_collective, waiting_in

# torch 2.13 renamed both and warns about the old names.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MOST_BROADCASTS = 8
"""Largest group of gloo's in which parameters are gathered by a broadcast from each rank."""

Kind = Literal["all_reduce", "enter", "gather", "gather_enter", "slice", "reduce_scatter", "exchange", "halo"]


class Traffic:
    """Counts what this rank has put on the wire: number of collectives and bytes of their local input, by operation."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, name: str, value: Tensor) -> None:
        """Count one collective."""
        begin_collective()
        self.calls[name] += 1
        self.bytes[name] += value.numel() * value.element_size()

    def reset(self) -> None:
        """Start again at zero."""
        self.calls.clear()
        self.bytes.clear()


traffic = Traffic()
"""The counter of this process."""
LOOK_EVERY = timedelta(seconds=2)
on_long_wait: list[Callable[[], None]] = []
"""Called every `LOOK_EVERY` while this process waits in a collective; may raise."""


class Pending:
    """A tensor that may still be on its way."""

    def __init__(
        self,
        value: Tensor,
        work: dist.Work | Sequence[dist.Work] | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
        name: str = "a collective",
    ) -> None:
        self._value = value
        self._works = [*work] if isinstance(work, Sequence) else [] if work is None else [work]
        self._finish = finish
        self._name = name

    @property
    def dtype(self) -> torch.dtype:
        """The type of the tensor."""
        return self._value.dtype

    @property
    def is_number_on_host(self) -> bool:
        """Whether it is one floating-point number, for which a wait would hold this process up."""
        value = self._value
        return not value.dim() and value.dtype.is_floating_point and value.device.type == "cpu"

    def wait(self) -> Tensor:
        """Return the tensor, waiting for it the first time."""
        while self._works:
            work = self._works.pop(0)
            if not work.is_completed():
                with waiting_in(self._describe):
                    self._wait_for_work(work)
            else:
                work.wait()
        if self._finish is not None:
            self._value = self._finish(self._value)
            self._finish = None
        return self._value

    def _wait_for_work(self, work: dist.Work) -> None:
        _wait(work, self._value.device)

    def _describe(self) -> str:
        return f"{self._name}, result {'x'.join(map(str, self._value.shape)) or 'scalar'}"


def _wait(work: dist.Work, device: torch.device) -> None:
    """Wait, and look around now and then when it takes long."""
    if device.type != "cpu":  # only gloo's waits can be left and taken up again
        work.wait()
        return
    while True:
        try:
            work.wait(LOOK_EVERY)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if it has failed
                return
            for look in on_long_wait:
                look()
        else:
            return


def start_all_reduce(value: Tensor, group: dist.ProcessGroup, *, in_place: bool = False) -> Pending:
    """Sum over the group. `value` is not changed, unless `in_place`: then nobody may read it any more."""
    traffic.add("all_reduce", value)
    result = value.contiguous() if in_place else value.clone(memory_format=torch.contiguous_format)
    return Pending(result, dist.all_reduce(result, group=group, async_op=True), name=_name("all_reduce", group))


def start_gather(value: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Pending:
    """Join the parts of the group's ranks along `dim`: (.., n, ..) -> (.., n * group size, ..)."""
    value = value.contiguous()
    shape, size = value.shape, dist.get_world_size(group)
    flat = value.new_empty(size * value.numel())
    flat_value, name = value.view(-1), _name("all_gather", group)
    traffic.add("all_gather", value)
    work = _all_gather_flat(flat, flat_value, group=group, async_op=True)

    def join(parts: Tensor) -> Tensor:
        if dim == 0:
            return parts.view(size * shape[0], *shape[1:])
        return torch.cat(list(parts.view(size, *shape).unbind(0)), dim)

    return Pending(flat, work, join, name)


def start_gather_of(parts: Sequence[Tensor], group: dist.ProcessGroup) -> Pending:
    """Join several tensors of each rank in one message: -> (group size, elements of all of them).

    They are written into this rank's place of the result, so that the message needs no memory of its own. gloo's
    all-gather takes as much again as the result, and copies it; a broadcast from each rank does neither.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    gathered = parts[0].new_empty(size, sum(part.numel() for part in parts))
    own = gathered[rank]
    torch.cat([part.reshape(-1) for part in parts], out=own)
    traffic.add("all_gather", own)
    name = _name("all_gather", group)
    if dist.get_backend(group) == "gloo" and size <= _MOST_BROADCASTS:
        sent = [
            dist.broadcast(gathered[source], group=group, group_src=source, async_op=True) for source in range(size)
        ]
        return Pending(gathered, sent, name=name)
    return Pending(gathered, _all_gather_flat(gathered.view(-1), own, group=group, async_op=True), name=name)


def start_reduce_scatter(value: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Pending:
    """Sum over the group and keep this rank's part of `dim`: (.., n * group size, ..) -> (.., n, ..).

    gloo has no real reduce-scatter; exchanging the parts and adding them up moves half the bytes of its all-reduce
    and adds in rank order on every rank.
    """
    traffic.add("reduce_scatter", value)
    size = dist.get_world_size(group)
    parts = _parts(value, size, dim)
    if dist.get_backend(group) != "gloo":
        result = torch.empty_like(parts[0])
        work = _reduce_scatter_flat(result, parts.view(-1, *parts.shape[2:]), group=group, async_op=True)
        return Pending(result, work, name=_name("reduce_scatter", group))
    return _start_exchange_and_add(parts, group)


def _start_exchange_and_add(parts: Tensor, group: dist.ProcessGroup) -> Pending:
    """Reduce-scatter of gloo: (ranks, *part) -> the sum of this rank's parts, added up in rank order.

    The first and the last rank leave their own part out of the exchange; the others would have to copy what is left.
    """
    size, rank = parts.shape[0], dist.get_rank(group)
    begin, end = (1, size) if rank == 0 else (0, size - 1 if rank == size - 1 else size)
    sent = parts[begin:end]
    received = torch.empty_like(sent)
    splits = [int(begin <= other < end) for other in range(size)]
    work = dist.all_to_all_single(received, sent, splits, splits, group=group, async_op=True)

    def add_up(got: Tensor) -> Tensor:
        given = [*parts[:begin], *got, *parts[end:]]
        total = got[0].add_(parts[rank]) if size == 2 else given[0] + given[1]  # two may be added in either order
        for part in given[2:]:
            total += part
        return total

    return Pending(received, work, add_up, _name("reduce_scatter", group))


def start_exchange(value: Tensor, group: dist.ProcessGroup, dim: int, from_dim: int) -> Pending:
    """Cut `dim` over the group and join `from_dim`: an all-to-all."""
    traffic.add("all_to_all", value)
    size = dist.get_world_size(group)
    parts = _parts(value, size, dim)
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=group, async_op=True)
    return Pending(received, work, lambda got: torch.cat(list(got.unbind(0)), from_dim), _name("all_to_all", group))


def start_halo(message: Message, group: dist.ProcessGroup, join: Callable[[list[Tensor]], Tensor]) -> Pending:
    """Send each rank of the group its piece, of any size, and join what the others sent."""
    traffic.add("halo", message.flat)
    received = message.flat.new_empty(sum(message.receive_sizes))
    work = dist.all_to_all_single(
        received, message.flat, message.receive_sizes, message.send_sizes, group=group, async_op=True
    )
    return Pending(received, work, lambda got: join(message.pieces(got)), _name("halo", group))


def _name(operation: str, group: dist.ProcessGroup) -> str:
    return f"{operation} of {dist.get_world_size(group)} ranks"


def _parts(value: Tensor, count: int, dim: int) -> Tensor:
    """Return (count, *part shape), contiguous: the equal parts of `dim`."""
    if dim == 0:
        return value.contiguous().view(count, value.shape[0] // count, *value.shape[1:])
    return torch.stack(value.chunk(count, dim))


@dataclass(frozen=True)
class Collective:
    """One collective of a partitioned graph."""

    kind: Kind
    axes: Axes
    dim: int = 0
    from_dim: int = 0
    window: Window | None = None
    """What each rank reads; of a halo."""

    def __str__(self) -> str:
        where = "" if self.kind in ("all_reduce", "enter") else f" dim {self.dim}"
        if self.kind == "exchange":
            where = f" dim {self.from_dim} -> {self.dim}"
        if self.window is not None:
            where += f", {self.window.length} rows from {self.window.offset} every {self.window.step}"
        return f"{self.kind}{where} over axes {','.join(map(str, self.axes))}"

    @property
    def is_local(self) -> bool:
        """True when nothing moves on the way forward."""
        return self.kind in ("enter", "slice")

    @property
    def moves_backward(self) -> bool:
        """True when data moves on the way back."""
        return self.kind not in ("all_reduce", "gather")

    def start_forward(self, value: Tensor, mesh: Mesh, rank: int) -> Pending:
        """Start what happens to a value."""
        group = axes_group(mesh, self.axes)
        match self.kind:
            case "all_reduce":
                return start_all_reduce(value, group)
            case "enter":
                return Pending(value)
            case "gather" | "gather_enter":
                return start_gather(value, group, self.dim)
            case "slice":
                return Pending(self._part(value, mesh, rank))
            case "reduce_scatter":
                return start_reduce_scatter(value, group, self.dim)
            case "exchange":
                return start_exchange(value, group, self.dim, self.from_dim)
            case "halo":
                place = self._place(mesh, rank)
                message = window_message(value, *place)
                return start_halo(message, group, lambda pieces: join_window(value, pieces, *place))

    def start_backward(self, grad: Tensor, mesh: Mesh, rank: int) -> Pending:
        """Start what happens to the gradient of the result; gives the gradient of the value."""
        group = axes_group(mesh, self.axes)
        match self.kind:
            case "all_reduce":
                return Pending(grad)
            case "enter":
                return start_all_reduce(grad, group)
            case "gather":
                return Pending(self._part(grad, mesh, rank))
            case "gather_enter":
                return start_reduce_scatter(grad, group, self.dim)
            case "slice" | "reduce_scatter":
                return start_gather(grad, group, self.dim)
            case "exchange":
                return start_exchange(grad, group, self.from_dim, self.dim)
            case "halo":
                place = self._place(mesh, rank)
                message = gradient_message(grad, *place)
                return start_halo(message, group, lambda pieces: add_gradients(grad, pieces, *place))

    def _place(self, mesh: Mesh, rank: int) -> tuple[int, Window, int, int]:
        """Return dimension, window, this rank's index and the number of parts."""
        assert self.window is not None
        return self.dim, self.window, mesh.index(rank, self.axes), mesh.extent(self.axes)

    def _part(self, value: Tensor, mesh: Mesh, rank: int) -> Tensor:
        length = value.shape[self.dim] // mesh.extent(self.axes)
        return value.narrow(self.dim, mesh.index(rank, self.axes) * length, length).contiguous()
