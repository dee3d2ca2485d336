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
from msrun.runtime.server.frames import ERROR, FrameError, FrameReader, Message, encode
from msrun.runtime.server.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    NotProved,
    build_claim,
    check_answer,
    new_nonce,
)
from msrun.runtime.server.meeting import find_addresses

CONNECT_S = 60.0


def count_servers() -> int:
    """Return how many parameter servers the job has; 0 where msrun was not told to start any."""
    is_told = contract.MSRUN_SERVER_TOKEN in os.environ
    return int(os.environ.get(contract.MS_SERVER_NUM, "0")) if is_told else 0


class Connection:
    """One connection to one server. Requests and replies take turns."""

    def __init__(self, index: int, address: str, port: int, token: bytes, global_rank: int) -> None:
        """
        Raises:
            WorldError: nobody is there, or somebody who does not know the token.
        """
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

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._stream.recv(count - len(data))
            if not more:
                raise EOFError("it has closed the connection")
            data += more
        return data

    def send(self, message: Message) -> None:
        """Send a request.

        Raises:
            WorldError: the server has gone.
        """
        try:
            pieces = encode(message)
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
        """Wait for the reply to the request before.

        Raises:
            WorldError: the server has gone.
        """
        message = None
        while message is None:
            try:
                count = self._stream.recv_into(self._reader.wanted)
                if not count:
                    raise self._lost("it has closed the connection")
                message = self._reader.advance(count)
            except (OSError, FrameError) as error:
                raise self._lost(str(error)) from None
        return message

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

    Raises:
        WorldError: a server has gone.
        ParallelError: one cannot do what it was asked for.
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
