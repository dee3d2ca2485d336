"""A worker's connections to the parameter servers: one to each, opened at the first request."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping

from msrun import contract
from msrun.errors import ParallelError, WorldError
from msrun.runtime import world
from msrun.runtime.progress import waiting_in
from msrun.server.frames import (
    DONE,
    ERROR,
    LEAST_BYTES,
    MOST_BYTES,
    SHARE,
    FrameError,
    FrameReader,
    Message,
    SharedBody,
    body_bytes,
    encode,
    offer,
)
from msrun.server.meeting import (
    NONCE_BYTES,
    PROOF_BYTES,
    NotProved,
    build_claim,
    check_answer,
    find_addresses,
    new_nonce,
)

CONNECT_S = 60.0


def count_servers() -> int:
    """Return how many parameter servers the job has; 0 where msrun was not told to start any."""
    is_told = contract.MSRUN_SERVER_TOKEN in os.environ
    return int(os.environ.get(contract.MS_SERVER_NUM, "0")) if is_told else 0


class Connection:
    """One connection to one server. Requests and replies take turns."""

    def __init__(self, index: int, address: str, port: int, token: bytes, global_rank: int) -> None:
        self._name = f"parameter server {index} at {address}:{port}"
        try:
            self._stream = socket.create_connection((address, port), timeout=CONNECT_S)
            self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            theirs, own = self._receive(NONCE_BYTES), new_nonce()
            self._stream.sendall(build_claim(token, theirs, own, global_rank))
            check_answer(token, theirs, own, index, self._receive(PROOF_BYTES))
            self._stream.settimeout(None)
        except (OSError, EOFError, NotProved) as error:
            raise WorldError(f"{self._name}: {error or 'it has closed the connection'}") from None
        self._reader = FrameReader()
        self._shared: SharedBody | None = None
        self._may_share = self._stream.getpeername()[0] == self._stream.getsockname()[0]  # on one machine
        self._most_bytes = 0
        """Of a body so far, in either direction, that went through the socket."""

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._stream.recv(count - len(data))
            if not more:
                raise EOFError("it has closed the connection")
            data += more
        return data

    def send(self, message: Message) -> None:
        """Send a request."""
        shared = self._find_room(body_bytes(message))
        try:
            pieces = encode(message) if shared is None else encode(message, shared.requests, shared.next_request())
            while pieces:
                sent = self._stream.sendmsg(pieces[:64])
                while sent:
                    if sent < pieces[0].nbytes:
                        pieces[0] = pieces[0][sent:]
                        break
                    sent -= pieces.pop(0).nbytes
        except OSError as error:
            raise self._lost(error.strerror or "") from None
        except FrameError as error:
            raise ParallelError(f"{self._name}: {error}") from None

    def receive(self) -> Message:
        """Wait for the reply to the request before."""
        message = None
        while message is None:
            try:
                count = self._stream.recv_into(self._reader.wanted)
                if not count:
                    raise self._lost("it has closed the connection")
                message = self._reader.advance(count)
            except (OSError, FrameError) as error:
                raise self._lost(str(error)) from None
        if not message.is_lent:
            self._most_bytes = max(self._most_bytes, body_bytes(message))
        return message

    def _find_room(self, size: int) -> SharedBody | None:
        """Return where a body of this size is put for the server to see; None: it is sent."""
        wanted = max(size, self._most_bytes)
        known = 0 if self._shared is None else self._shared.size
        if self._may_share and max(known, LEAST_BYTES) < wanted <= MOST_BYTES:
            self._share(wanted)
        if self._shared is None or not LEAST_BYTES <= size <= self._shared.size:
            return None
        return self._shared

    def _share(self, wanted: int) -> None:
        """Offer memory to the server; where it cannot open it, bodies go on through the socket."""
        self._may_share = False  # until it has
        descriptor, size, fields = offer(wanted)
        self.send(Message(SHARE, fields))
        self._may_share = self.receive().kind == DONE
        shared = SharedBody(descriptor, size)
        if self._may_share:
            self._shared, self._reader.room = shared, shared.reply

    def _lost(self, reason: str) -> WorldError:
        return WorldError(f"{self._name} is lost ({reason}): its log says why")

    def close(self) -> None:
        """Close it; the server then knows that this worker sends no more gradients."""
        self._stream.close()


@functools.cache
def _open_all() -> list[Connection]:
    token = bytes.fromhex(os.environ[contract.MSRUN_SERVER_TOKEN])
    with waiting_in(lambda: "the start of the parameter servers"):
        addresses = find_addresses(count_servers())
        rank = world.get_rank()
        return [Connection(index, *place, token, rank) for index, place in enumerate(addresses)]


def ask(requests: Mapping[int, Message]) -> dict[int, Message]:
    """Send a request to each of some servers, and return their replies.

    Tensors of a reply may be in memory that the next request to the same server gives back.
    """
    connections = _open_all()
    kinds = {message.kind for message in requests.values()}
    with waiting_in(lambda: f"{' and '.join(sorted(kinds))} of parameter servers"):
        for server, message in requests.items():
            connections[server].send(message)
        replies = {server: connections[server].receive() for server in requests}  # all: each answers one request
    for server, reply in replies.items():
        if reply.kind == ERROR:
            raise ParallelError(f"parameter server {server}: {reply.fields.get('text')}")
    return replies


def close_all() -> None:
    """Leave the servers."""
    if _open_all.cache_info().currsize:
        for connection in _open_all():
            connection.close()
        _open_all.cache_clear()


world.at_release(close_all)
