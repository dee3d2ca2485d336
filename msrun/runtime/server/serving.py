"""The event loop of a parameter server: one thread, all its connections in one selector, nothing that blocks."""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections import deque
from typing import NoReturn

from torch import Tensor

from msrun.runtime.server.frames import DONE, ERROR, FrameError, FrameReader, Message, body_bytes, encode
from msrun.runtime.server.handshake import CLAIM_BYTES, NotProved, build_answer, check_claim, new_nonce
from msrun.runtime.server.service import Service
from msrun.runtime.server.shared_body import LEAST_BYTES, SHARE, SharedBody, accept

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
        self.nonce = new_nonce()
        self.claim = bytearray()
        self.rank: int | None = None
        """None until it has proved who it is."""
        self.reader = FrameReader()
        self.shared: SharedBody | None = None
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
            for key, events in self._selector.select(self._time_left()):
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
                except (OSError, EOFError, FrameError, NotProved) as error:
                    self._close(peer, error)
                self._watch(peer)
            self._close_late()

    def _time_left(self) -> float | None:
        return max(0.0, self._unproved[0].since + PROVE_S - time.monotonic()) if self._unproved else None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            stream, _ = self._listener.accept()
            stream.setblocking(False)  # noqa: FBT003
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(stream, time.monotonic())
            self._selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            self._unproved.append(peer)
            if len(self._unproved) > self._workers + MAX_STRANGERS:
                self._close(self._unproved[0], NotProved("too many connections without proof"))

    def _close_late(self) -> None:
        while self._unproved and time.monotonic() >= self._unproved[0].since + PROVE_S:
            self._close(self._unproved[0], NotProved(f"no proof for {PROVE_S:g} s"))

    def _read(self, peer: Peer) -> None:
        for _ in range(READS):
            if peer.rank is None:
                self._hear_claim(peer)
                continue
            count = peer.stream.recv_into(peer.reader.wanted)
            if not count:
                raise EOFError("connection closed")
            message = peer.reader.advance(count)
            if message is not None and message.kind == SHARE:
                self._share(peer, message)
            elif message is not None:
                self.service.handle(peer.rank, message)

    def _share(self, peer: Peer, message: Message) -> None:
        """Take the memory that a worker of this machine offers for the bodies of its messages."""
        assert peer.rank is not None
        try:
            peer.shared = accept(message.fields)
        except (RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
            self._reply(peer.rank, Message(ERROR, {"text": f"memory of rank {peer.rank}: {error}"}))
            return
        peer.reader.room = peer.shared.requests
        self._reply(peer.rank, Message(DONE))

    def _hear_claim(self, peer: Peer) -> None:
        data = peer.stream.recv(CLAIM_BYTES - len(peer.claim))
        if not data:
            raise EOFError("connection closed")
        peer.claim += data
        if len(peer.claim) < CLAIM_BYTES:
            return
        rank, nonce = check_claim(self._token, peer.nonce, bytes(peer.claim))
        if not 0 <= rank < self._workers or rank in self._by_rank:
            raise NotProved(f"rank {rank} is connected already, or not in the job")
        peer.rank = rank
        self._by_rank[rank] = peer
        self.service.come(rank)
        self._unproved.remove(peer)
        peer.out.append(memoryview(build_answer(self._token, peer.nonce, nonce, self._index)))
        peer.write()

    def _reply(self, rank: int, message: Message) -> None:
        peer = self._by_rank.get(rank)
        if peer is None:
            return
        try:
            peer.out.extend(encode(message, self._find_room(rank, body_bytes(message))))
        except FrameError as error:
            peer.out.extend(encode(Message(ERROR, {"text": str(error)})))
        with contextlib.suppress(OSError):  # its end is read next
            peer.write()
        self._watch(peer)

    def _find_room(self, rank: int, size: int) -> Tensor | None:
        """Return memory that a worker sees, for a body of this size to it; None: it is sent."""
        shared = self._by_rank[rank].shared if rank in self._by_rank else None
        return shared.reply[:size] if shared is not None and LEAST_BYTES <= size <= shared.size else None

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
        if isinstance(error, FrameError):
            say(f"closed the connection of rank {peer.rank}: {error}")
        self.service.leave(peer.rank)
