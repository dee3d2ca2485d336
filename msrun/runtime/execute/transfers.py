"""What moves: collectives, copies between host and device, messages between stages; started now, waited for later."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.runtime import progress, world
from msrun.runtime.groups import axes_group, carries_by_gloo
from msrun.runtime.progress import begin_collective, waiting_in
from msrun.runtime.sharding.collective import (
    Collective,
    Message,
    Window,
    add_gradients,
    gradient_message,
    join_window,
    window_message,
)
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators import rows as row_exchange

LOOK_EVERY_S = 0.2
LONG_S = 1.0
"""How long the device waits before its wait has a name: what computes for long looks the same until then."""

_waits: SimpleQueue[tuple[str, Any]] = SimpleQueue()
_watcher: threading.Thread | None = None


def note_wait(name: str, device: torch.device) -> None:
    """Say that what the device computes next waits for a collective. Costs an event, and nothing outside msrun."""
    if progress.is_recorded():
        event = torch.Event(device)
        event.record()
        watch(name, event)


def watch(name: str, event: Any) -> None:
    """Tell msrun when the device does not pass an event for long.

    Args:
        event: has `query()`, which returns whether the device has passed it.
    """
    global _watcher
    _waits.put((name, event))
    if _watcher is None or not _watcher.is_alive():  # the first one, or in a forked child
        _watcher = threading.Thread(target=_look, name="msrun-device-waits", daemon=True)
        _watcher.start()


def _look() -> None:
    while True:
        name, event = _waits.get()
        begin = time.monotonic()
        while not event.query() and time.monotonic() - begin < LONG_S:
            time.sleep(LOOK_EVERY_S)
        if not event.query():
            with progress.waiting_in(partial("{}, on the device".format, name), is_traced=False):
                while not event.query():
                    time.sleep(LOOK_EVERY_S)


class Traffic:
    """Counts what this rank has put on the wire, and copied between host and device: number and bytes, by operation."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._copying = Lock()

    def add(self, name: str, value: Tensor) -> None:
        """Count one collective."""
        self.add_bytes(name, value.numel() * value.element_size())

    def add_bytes(self, name: str, nbytes: int) -> None:
        """Count one collective of so many bytes."""
        begin_collective()
        self.calls[name] += 1
        self.bytes[name] += nbytes

    def add_copy(self, name: str, value: Tensor) -> None:
        """Count one copy between the memories of the host and the device; in any thread."""
        with self._copying:
            self.calls[name] += 1
            self.bytes[name] += value.numel() * value.element_size()

    def reset(self) -> None:
        """Start again at zero."""
        self.calls.clear()
        self.bytes.clear()


traffic = Traffic()
"""The counter of this process."""


LOOK_EVERY = timedelta(seconds=2)
on_message: list[Callable[[TensorFuture], None]] = []
"""Called when a message has been started."""
on_wait: list[Callable[[TensorFuture], None]] = []
"""Called when this process is about to use what a message brings."""
on_long_wait: list[Callable[[], None]] = []
"""Called every `LOOK_EVERY` while this process waits in a collective; may raise."""


class TensorFuture:
    """A tensor that may still be on its way."""

    def __init__(
        self,
        value: Tensor,
        work: dist.Work | Sequence[dist.Work] | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
        name: str = "a collective",
        shape: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            finish: makes the tensor of what has come.
            shape: of the tensor, where that is not what has come.
        """
        self._value = value
        self._shape = value.shape if shape is None else shape
        self._works = [*work] if isinstance(work, Sequence) else [] if work is None else [work]
        self._finish = finish
        self._name = name
        for look in on_message:
            look(self)

    @property
    def is_message(self) -> bool:
        """Whether other ranks send it."""
        return bool(self._works) or self._finish is not None

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
        for look in on_wait if self._works else ():
            look(self)
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
        device = self._value.device
        if device.type == "cpu":
            _wait(work)
        else:  # only gloo's waits on the host can be left and taken up again
            work.wait()
            note_wait(self._describe(), device)

    def _describe(self) -> str:
        return f"{self._name}, result {'x'.join(map(str, self._shape)) or 'scalar'}"


def _wait(work: dist.Work) -> None:
    """Wait, and look around now and then when it takes long."""
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


def name_of(operation: str, group: dist.ProcessGroup) -> str:
    """Return what to call an operation of a group, for whoever asks what this rank waits for."""
    return f"{operation} of {dist.get_world_size(group)} ranks"


# torch 2.13 renamed both and warns about the old names.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MOST_BROADCASTS = 8
"""Largest group of gloo's in which parameters are gathered by a broadcast from each rank."""


def start_all_reduce(value: Tensor, group: dist.ProcessGroup, *, in_place: bool = False) -> TensorFuture:
    """Sum over the group. `value` is not changed, unless `in_place`: then nobody may read it any more."""
    traffic.add("all_reduce", value)
    own = value.contiguous() if in_place else value.clone(memory_format=torch.contiguous_format)
    return TensorFuture(own, dist.all_reduce(own, group=group, async_op=True), name=name_of("all_reduce", group))


def start_gather(value: Tensor, group: dist.ProcessGroup, dim: int = 0) -> TensorFuture:
    """Join the parts of the group's ranks along `dim`: (.., n, ..) -> (.., n * group size, ..)."""
    value = value.contiguous()
    shape, size = value.shape, dist.get_world_size(group)
    flat = value.new_empty(size * value.numel())
    flat_value, name = value.view(-1), name_of("all_gather", group)
    traffic.add("all_gather", value)
    work = _all_gather_flat(flat, flat_value, group=group, async_op=True)

    def join(parts: Tensor) -> Tensor:
        if dim == 0:
            return parts.view(size * shape[0], *shape[1:])
        return torch.cat(list(parts.view(size, *shape).unbind(0)), dim)

    return TensorFuture(flat, work, join, name)


def start_gather_of(parts: Sequence[Tensor], group: dist.ProcessGroup) -> TensorFuture:
    """Join several tensors of each rank in one message: -> (group size, elements of all of them).

    They are written into this rank's place of the result, so that the message needs no memory of its own. gloo's
    all-gather takes as much again as the result, and copies it; a broadcast from each rank does neither.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    gathered = parts[0].new_empty(size, sum(part.numel() for part in parts))
    own = gathered[rank]
    torch.cat([part.reshape(-1) for part in parts], out=own)
    traffic.add("all_gather", own)
    name = name_of("all_gather", group)
    if carries_by_gloo(group, own.device) and size <= _MOST_BROADCASTS:
        sent = [
            dist.broadcast(gathered[source], group=group, group_src=source, async_op=True) for source in range(size)
        ]
        return TensorFuture(gathered, sent, name=name)
    return TensorFuture(gathered, _all_gather_flat(gathered.view(-1), own, group=group, async_op=True), name=name)


def start_reduce_scatter(value: Tensor, group: dist.ProcessGroup, dim: int = 0) -> TensorFuture:
    """Sum over the group and keep this rank's part of `dim`: (.., n * group size, ..) -> (.., n, ..).

    gloo has no real reduce-scatter; exchanging the parts and adding them up moves half the bytes of its all-reduce
    and adds in rank order on every rank.
    """
    traffic.add("reduce_scatter", value)
    size = dist.get_world_size(group)
    parts = _parts(value, size, dim)
    if not carries_by_gloo(group, value.device):
        result = torch.empty_like(parts[0])
        work = _reduce_scatter_flat(result, parts.view(-1, *parts.shape[2:]), group=group, async_op=True)
        return TensorFuture(result, work, name=name_of("reduce_scatter", group))
    return _start_exchange_and_add(parts, group)


def _start_exchange_and_add(parts: Tensor, group: dist.ProcessGroup) -> TensorFuture:
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

    return TensorFuture(received, work, add_up, name_of("reduce_scatter", group))


def start_exchange(value: Tensor, group: dist.ProcessGroup, dim: int, from_dim: int) -> TensorFuture:
    """Cut `dim` over the group and join `from_dim`: an all-to-all."""
    traffic.add("all_to_all", value)
    size = dist.get_world_size(group)
    parts = _parts(value, size, dim)
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=group, async_op=True)
    return TensorFuture(
        received, work, lambda got: torch.cat(list(got.unbind(0)), from_dim), name_of("all_to_all", group)
    )


def start_halo(message: Message, group: dist.ProcessGroup, join: Callable[[list[Tensor]], Tensor]) -> TensorFuture:
    """Send each rank of the group its piece, of any size, and join what the others sent."""
    traffic.add("halo", message.flat)
    received = message.flat.new_empty(sum(message.receive_sizes))
    work = dist.all_to_all_single(
        received, message.flat, message.receive_sizes, message.send_sizes, group=group, async_op=True
    )
    return TensorFuture(received, work, lambda got: join(message.pieces(got)), name_of("halo", group))


def start_row_exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> TensorFuture:
    """Send each rank of the group its rows, and join what the others sent: (sum of sent, ..) -> (sum of received, ..).

    Args:
        sent: rows for each rank, which stand in rank order.
        received: rows from each rank.
    """
    traffic.add("all_to_all", rows)
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(arrived, rows.contiguous(), [*received], [*sent], group=group, async_op=True)
    return TensorFuture(arrived, work, name=name_of("all_to_all", group))


class _RowsOfOperators:
    """Rows that operators send while they compute."""

    def start(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], mesh: Mesh, axes: Axes, what: str
    ) -> TensorFuture:
        group = axes_group(mesh, axes)
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(arrived, rows, [*received], [*sent], group=group, async_op=True)
        return TensorFuture(arrived, work, name=name_of(what, group))

    def count(self, what: str, nbytes: int) -> None:
        traffic.add_bytes(what, nbytes)


row_exchange.carrier = _RowsOfOperators()


def _parts(value: Tensor, count: int, dim: int) -> Tensor:
    """Return (count, *part shape), contiguous: the equal parts of `dim`."""
    if dim == 0:
        return value.contiguous().view(count, value.shape[0] // count, *value.shape[1:])
    return torch.stack(value.chunk(count, dim)).contiguous()  # stack keeps strides such as those of channels_last


def start_forward(
    collective: Collective, value: Tensor, mesh: Mesh, rank: int, *, in_place: bool = False
) -> TensorFuture:
    """Start what happens to a value.

    Args:
        in_place: nobody else reads it; an all-reduce may write to it.
    """
    if collective.is_copy:
        return start_copy(value, to_host=collective.kind == "to_host")
    group = axes_group(mesh, collective.axes)
    match collective.kind:
        case "all_reduce":
            return start_all_reduce(value, group, in_place=in_place)
        case "enter":
            return TensorFuture(value)
        case "gather" | "gather_enter":
            return start_gather(value, group, collective.dim)
        case "slice":
            return TensorFuture(_part(collective, value, mesh, rank))
        case "reduce_scatter":
            return start_reduce_scatter(value, group, collective.dim)
        case "exchange":
            return start_exchange(value, group, collective.dim, collective.from_dim)
    place = _place_in_window(collective, mesh, rank)
    message = window_message(value, *place)
    return start_halo(message, group, lambda pieces: join_window(value, pieces, *place))


def start_backward(
    collective: Collective, grad: Tensor, mesh: Mesh, rank: int, *, in_place: bool = False
) -> TensorFuture:
    """Start what happens to the gradient of the result; gives the gradient of the value. `in_place`: see there."""
    if collective.is_copy:
        return start_copy(grad, to_host=collective.kind == "to_device")
    group = axes_group(mesh, collective.axes)
    match collective.kind:
        case "all_reduce":
            return TensorFuture(grad)
        case "enter":
            return start_all_reduce(grad, group, in_place=in_place)
        case "gather":
            return TensorFuture(_part(collective, grad, mesh, rank))
        case "gather_enter":
            return start_reduce_scatter(grad, group, collective.dim)
        case "slice" | "reduce_scatter":
            return start_gather(grad, group, collective.dim)
        case "exchange":
            return start_exchange(grad, group, collective.from_dim, collective.dim)
    place = _place_in_window(collective, mesh, rank)
    message = gradient_message(grad, *place)
    return start_halo(message, group, lambda pieces: add_gradients(grad, pieces, *place))


def _place_in_window(collective: Collective, mesh: Mesh, rank: int) -> tuple[int, Window, int, int]:
    """Return dimension, window, this rank's index and the number of parts, of a halo."""
    assert collective.window is not None, collective.kind
    return collective.dim, collective.window, mesh.index(rank, collective.axes), mesh.extent(collective.axes)


def _part(collective: Collective, value: Tensor, mesh: Mesh, rank: int) -> Tensor:
    length = value.shape[collective.dim] // mesh.extent(collective.axes)
    return value.narrow(collective.dim, mesh.index(rank, collective.axes) * length, length).contiguous()


HOST = torch.device("cpu")


def start_copy(value: Tensor, *, to_host: bool) -> TensorFuture:
    """Copy a tensor to the memory of the host, or of this rank's device. Nobody may write to it before the wait."""
    traffic.add_copy("to_host" if to_host else "to_device", value)
    accelerator = value.device if to_host else world.device()
    if accelerator.type == "cpu":
        return TensorFuture(value.clone())
    devices = torch.get_device_module(accelerator.type)
    stream = _stream(accelerator, to_host=to_host)
    with devices.device(accelerator):
        if to_host:
            stream.wait_stream(devices.current_stream(accelerator))
            value.record_stream(stream)
        with devices.stream(stream):
            memory = HOST if to_host else accelerator
            copied = torch.empty_like(value, device=memory, pin_memory=to_host).copy_(value, non_blocking=True)
            return _Copying(value, copied, stream.record_event())


class _Copying(TensorFuture):
    """A tensor that a stream is copying."""

    def __init__(self, source: Tensor, copied: Tensor, event: Any) -> None:
        super().__init__(copied)
        self._source: Tensor | None = source
        self._event = event

    def wait(self) -> Tensor:
        """Return the copy: on the host when it has arrived, on a device for whatever its stream computes next."""
        if self._source is not None:
            if self._value.device.type == "cpu":
                self._event.synchronize()
            else:
                current = torch.get_device_module(self._value.device.type).current_stream(self._value.device)
                current.wait_event(self._event)
                self._value.record_stream(current)
            self._source = None
        return self._value


@functools.cache
def _stream(accelerator: torch.device, *, to_host: bool) -> Any:  # noqa: ARG001 - one stream for each direction
    return torch.get_device_module(accelerator.type).Stream(accelerator)


def start_send(value: Tensor, to_rank: int, group: dist.ProcessGroup, what: Callable[[], str]) -> TensorFuture:
    """Send a tensor to one rank of the group. Nobody may write to it before `wait` has returned.

    Args:
        to_rank: world rank.
        what: name of the message, for whoever asks what this rank waits for.
    """
    traffic.add("send", value)
    value = value.contiguous()

    def describe() -> str:
        return f"send of {what()} to rank {to_rank}"

    with waiting_in(describe):  # the first message between two ranks waits for the other one
        work = dist.isend(value, to_rank, group=group)
    return _Message(value, work, describe)


def start_receive(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    from_rank: int,
    group: dist.ProcessGroup,
    what: Callable[[], str],
) -> TensorFuture:
    """Receive a tensor of known shape from one rank of the group.

    Args:
        from_rank: world rank.
        what: name of the message.
    """
    value = torch.empty(shape, dtype=dtype, device=device)
    traffic.add("receive", value)

    def describe() -> str:
        return f"receive of {what()} from rank {from_rank}"

    with waiting_in(describe):
        work = dist.irecv(value, from_rank, group=group)
    return _Message(value, work, describe)


class _Message(TensorFuture):
    """A message whose name is made only when somebody waits for it."""

    def __init__(self, value: Tensor, work: dist.Work | None, describe: Callable[[], str]) -> None:
        super().__init__(value, work)
        self._describe_message = describe

    def _wait_for_work(self, work: dist.Work) -> None:
        work.wait()  # gloo gives a message up for good when a wait for it times out

    def _describe(self) -> str:
        return self._describe_message()
