"""The event loop of a parameter server: one thread, all its connections in one selector, nothing that blocks."""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from msrun.errors import MsrunError, ParallelError
from msrun.server import connection as wire
from msrun.server.remote import Fill, Piece, make_rows
from msrun.server.shard import Gradient, Shard

Reply = TypeVar("Reply", bound=wire.Message | None)


@dataclass(frozen=True)
class _Waiting:
    """A worker that waits for values."""

    rank: int
    shards: Sequence[Shard]
    reply: Callable[[], wire.Message]
    staleness: int | None

    def answer(self) -> wire.Message:
        for shard in self.shards:
            shard.check_steps()
        return self.reply()

    @property
    def is_over(self) -> bool:
        return all(shard.is_ready(self.rank, staleness=self.staleness) for shard in self.shards)


class Service:
    """The shards of one server. Owned by its event loop; opens nothing."""

    def __init__(
        self,
        workers: int,
        send: Callable[[int, wire.Message], None],
        find_room: Callable[[int, int], Tensor | None] = lambda _rank, _size: None,
    ) -> None:
        """
        Args:
            send: takes the reply to a rank.
            find_room: gives memory that a rank sees, for a reply of so many bytes to it; None: it has none.
        """
        self._find_room = find_room
        self._workers = workers
        self._send = send
        self._shards: dict[tuple[int, int], Shard] = {}
        self._waiting: list[_Waiting] = []
        self._gone: set[int] = set()

    def handle(self, rank: int, message: wire.Message) -> None:
        """Do what a worker asks for; it gets its reply now or later."""
        reply = _answer(message.kind, lambda: self._do(rank, message))
        if reply is not None:
            self._send(rank, reply)
        self._look()

    def _do(self, rank: int, message: wire.Message) -> wire.Message | None:
        fields, tensors = message.fields, message.tensors
        match message.kind:
            case "create":
                self._create(fields)
            case "put":
                self._find(fields["shard"]).write(fields["field"], fields["begin"], tensors[0])
            case "make":
                values = self._find(fields["shard"]).values.detach()
                (kind, args, first, last), piece = fields["fill"], Piece(0, 0, *fields["piece"])
                fill = Fill(kind, args, first, last, tensors[0])
                return wire.Message(wire.DONE, {}, [make_rows(values, piece, fill, fields["rows"])])
            case "filled":
                self._find(fields["shard"]).is_filled = True
            case "configure":
                self._find(fields["shard"]).configure(fields["optimizer"], fields["group"])
            case "numbers":
                named = {name: value.clone() for name, value in zip(fields["names"], tensors, strict=True)}
                self._find(fields["shard"]).set_numbers({**fields["numbers"], **named})
            case "step":
                return self._step(rank, message)
            case "rows" | "read" | "state":
                shard = self._find(fields["shard"])
                staleness = None if message.kind == "rows" else 0
                self._waiting.append(_Waiting(rank, [shard], lambda: self._read(rank, shard, message), staleness))
                return None
            case _:
                raise ParallelError(f"no such request: {message.kind}")
        return wire.Message(wire.DONE)

    def come(self, rank: int) -> None:
        """Note that a worker has come, which may have left before."""
        self._gone.discard(rank)

    def leave(self, rank: int) -> None:
        """Note that a worker has gone, and tell those that wait for it."""
        self._gone.add(rank)
        self._waiting = [waiting for waiting in self._waiting if waiting.rank != rank]
        self._look()

    def describe(self) -> str:
        """Return what the server has done, in words."""
        size = sum(shard.values.nbytes for shard in self._shards.values())
        steps = max((shard.version for shard in self._shards.values()), default=0)
        return f"{len(self._shards)} pieces of {size} bytes, {steps} steps"

    # -- waiting --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Answer those who need not wait any more, or wait in vain."""
        still = []
        for waiting in self._waiting:
            missing = {other for shard in waiting.shards for other in shard.waits_for(waiting.rank)} & self._gone
            if waiting.is_over:
                self._send(waiting.rank, _answer("reply", waiting.answer))
            elif missing:
                shard = next(shard for shard in waiting.shards if shard.waits_for(waiting.rank) & missing)
                self._send(
                    waiting.rank, _error(f"{shard.label}: rank {min(missing)} has left without its next gradient")
                )
            else:
                still.append(waiting)
        self._waiting = still

    # -- requests -------------------------------------------------------------------------------------------------

    def _find(self, key: Sequence[int]) -> Shard:
        shard = self._shards.get((key[0], key[1]))
        if shard is None:
            raise ParallelError(f"parameter {key[0]}, piece {key[1]}: not here")
        return shard

    def _create(self, fields: dict[str, Any]) -> None:
        key = (fields["shard"][0], fields["shard"][1])
        shape, dtype = tuple(fields["shape"]), getattr(torch, fields["dtype"])
        if key not in self._shards:
            self._shards[key] = Shard(fields["label"], shape, dtype, self._workers, fields["staleness"])
        shard = self._shards[key]
        if (tuple(shard.values.shape), shard.values.dtype, shard.staleness) != (shape, dtype, fields["staleness"]):
            raise ParallelError(
                f"{fields['label']}: the ranks put other parameters on the servers, or give another staleness: call "
                "set_param_ps for the same modules in the same order on every rank"
            )

    def _step(self, rank: int, message: wire.Message) -> wire.Message | None:
        tensors = iter(message.tensors)
        groups = message.fields["groups"]
        for key, how, group in message.fields["pushes"]:
            gradient = _gradient(how, tensors, is_lent=message.is_lent)
            self._find(key).push(rank, gradient, groups[group])
        pulled = [self._find(key) for key in message.fields["pulls"]]
        if not pulled:  # the worker goes on beside the step
            self._send(rank, wire.Message(wire.DONE))
        for key, _, _ in message.fields["pushes"]:
            self._find(key).advance(rank)
        if pulled:
            reply = lambda: wire.Message(wire.DONE, {}, [shard.read_all() for shard in pulled])  # noqa: E731
            self._waiting.append(_Waiting(rank, pulled, reply, None))
        return None

    def _read(self, rank: int, shard: Shard, message: wire.Message) -> wire.Message:
        """Return the reply to a request that has waited for the steps before it."""
        fields = message.fields
        if message.kind == "rows":
            find_room = functools.partial(self._find_room, rank)
            return wire.Message(wire.DONE, {"version": shard.version}, [shard.read_rows(message.tensors[0], find_room)])
        if message.kind == "read":
            return wire.Message(wire.DONE, {}, [shard.read(fields["field"], fields["begin"], fields["end"])])
        numbers, tensors = shard.describe_state()
        small = {key: value for key, value in numbers.items() if isinstance(value, Tensor)}
        fields = {
            "shaped": list(tensors),
            "dtypes": [str(value.dtype).removeprefix("torch.") for value in tensors.values()],
            "numbers": {key: value for key, value in numbers.items() if key not in small},
            "names": list(small),
        }
        return wire.Message(wire.DONE, fields, list(small.values()))


def _gradient(how: str, tensors: Any, *, is_lent: bool) -> Gradient | None:
    if how == "none":
        return None
    rows = next(tensors) if how in ("rows", "sparse") else None
    return Gradient(next(tensors), rows, is_sparse=how == "sparse", is_lent=is_lent)


def _answer(kind: str, work: Callable[[], Reply]) -> Reply | wire.Message:
    """Return the reply, or an error in words: a wrong request is its worker's failure, not the server's end."""
    try:
        return work()
    except MsrunError as error:
        return _error(str(error))
    except Exception as error:  # noqa: BLE001 - whatever it was
        return _error(f"{kind}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _error(text: str) -> wire.Message:
    return wire.Message(wire.ERROR, {"text": text})


PROVE_S = 10.0
"""How long a connection may take to prove that it knows the token."""
MAX_STRANGERS = 64
"""Connections without proof at a time, beside those of all workers; the oldest is closed for a new one."""
READS = 16
"""From one connection before the others are looked at."""
SENDS = 64
"""Pieces of messages that one system call sends."""


def say(text: str) -> None:
    """Write a line to the server's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Peer:
    """One connection."""

    def __init__(self, stream: socket.socket, now: float) -> None:
        self.stream = stream
        self.nonce = wire.new_nonce()
        self.claim = bytearray()
        self.rank: int | None = None
        """None until it has proved who it is."""
        self.reader = wire.FrameReader()
        self.shared: wire.SharedBody | None = None
        self.since = now
        self.out: deque[memoryview] = deque([memoryview(self.nonce)])

    def write(self) -> None:
        """Send what the socket takes."""
        while self.out:
            try:
                sent = self.stream.sendmsg([self.out[index] for index in range(min(len(self.out), SENDS))])
            except BlockingIOError:
                return
            while sent:
                if sent < self.out[0].nbytes:
                    self.out[0] = self.out[0][sent:]
                    break
                sent -= self.out.popleft().nbytes


class Server:
    """Serves one parameter server's part until it is told to end."""

    def __init__(self, listener: socket.socket, token: bytes, index: int, workers: int) -> None:
        """
        Args:
            listener: listens already.
            token: of the job.
            workers: the ranks that may come are 0 to this.
        """
        self._listener = listener
        self._token = token
        self._index = index
        self._workers = workers
        self._selector = selectors.DefaultSelector()
        self._unproved: deque[Peer] = deque()
        self._by_rank: dict[int, Peer] = {}
        self.service = Service(workers, self._reply, self._find_room)

    def run(self) -> NoReturn:
        """Serve for ever; a signal ends it."""
        self._listener.setblocking(False)  # noqa: FBT003
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            time_left = None
            if self._unproved:
                time_left = max(0.0, self._unproved[0].since + PROVE_S - time.monotonic())
            for key, events in self._selector.select(time_left):
                if key.data is None:
                    self._accept()
                    continue
                peer: Peer = key.data
                try:
                    if events & selectors.EVENT_READ:
                        with contextlib.suppress(BlockingIOError):
                            self._read(peer)
                    if events & selectors.EVENT_WRITE and peer.stream.fileno() >= 0:
                        peer.write()
                except (OSError, EOFError, wire.FrameError, wire.NotProved) as error:
                    self._close(peer, error)
                self._watch(peer)
            while self._unproved and time.monotonic() >= self._unproved[0].since + PROVE_S:
                self._close(self._unproved[0], wire.NotProved(f"no proof for {PROVE_S:g} s"))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            stream, _ = self._listener.accept()
            stream.setblocking(False)  # noqa: FBT003
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(stream, time.monotonic())
            self._selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            self._unproved.append(peer)
            if len(self._unproved) > self._workers + MAX_STRANGERS:
                self._close(self._unproved[0], wire.NotProved("too many connections without proof"))

    def _read(self, peer: Peer) -> None:
        for _ in range(READS):
            if peer.rank is None:
                self._hear_claim(peer)
                continue
            count = peer.stream.recv_into(peer.reader.wanted)
            if not count:
                raise EOFError("connection closed")
            message = peer.reader.advance(count)
            if message is not None and message.kind == wire.SHARE:
                self._share(peer, message)
            elif message is not None:
                self.service.handle(peer.rank, message)

    def _share(self, peer: Peer, message: wire.Message) -> None:
        """Take the memory that a worker of this machine offers for the bodies of its messages."""
        assert peer.rank is not None
        try:
            peer.shared = wire.accept(message.fields)
        except (RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
            self._reply(peer.rank, wire.Message(wire.ERROR, {"text": f"memory of rank {peer.rank}: {error}"}))
            return
        peer.reader.room = peer.shared.requests
        self._reply(peer.rank, wire.Message(wire.DONE))

    def _hear_claim(self, peer: Peer) -> None:
        data = peer.stream.recv(wire.CLAIM_BYTES - len(peer.claim))
        if not data:
            raise EOFError("connection closed")
        peer.claim += data
        if len(peer.claim) < wire.CLAIM_BYTES:
            return
        rank, nonce = wire.check_claim(self._token, peer.nonce, bytes(peer.claim))
        if not 0 <= rank < self._workers or rank in self._by_rank:
            raise wire.NotProved(f"rank {rank} is connected already, or not in the job")
        peer.rank = rank
        self._by_rank[rank] = peer
        self.service.come(rank)
        self._unproved.remove(peer)
        peer.out.append(memoryview(wire.build_answer(self._token, peer.nonce, nonce, self._index)))
        peer.write()

    def _reply(self, rank: int, message: wire.Message) -> None:
        peer = self._by_rank.get(rank)
        if peer is None:
            return
        try:
            peer.out.extend(wire.encode(message, self._find_room(rank, wire.body_bytes(message))))
        except wire.FrameError as error:
            peer.out.extend(wire.encode(wire.Message(wire.ERROR, {"text": str(error)})))
        with contextlib.suppress(OSError):  # its end is read next
            peer.write()
        self._watch(peer)

    def _find_room(self, rank: int, size: int) -> Tensor | None:
        """Return memory that a worker sees, for a body of this size to it; None: it is sent."""
        shared = self._by_rank[rank].shared if rank in self._by_rank else None
        return shared.reply[:size] if shared is not None and wire.LEAST_BYTES <= size <= shared.size else None

    def _watch(self, peer: Peer) -> None:
        if peer.stream.fileno() >= 0:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
            self._selector.modify(peer.stream, wanted, peer)

    def _close(self, peer: Peer, error: Exception) -> None:
        if peer.stream.fileno() < 0:
            return
        self._selector.unregister(peer.stream)
        peer.stream.close()
        if peer.rank is None:
            self._unproved.remove(peer)
            say(f"refused a connection: {error}")
            return
        del self._by_rank[peer.rank]
        if isinstance(error, wire.FrameError):
            say(f"closed the connection of rank {peer.rank}: {error}")
        self.service.leave(peer.rank)
