"""How workers find the parameter servers of their job and prove who they are, and a worker's connections: one to each,
opened at the first request.

Each server writes its address into a store: on one host a file beside the workers' own, of several hosts the store in
which the workers meet, too; in a job that was started by hand the scheduler's.
"""

from __future__ import annotations

import functools
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # exported, not declared

from msrun import contract
from msrun.errors import ParallelError, WorldError
from msrun.runtime import world
from msrun.runtime.joining.meet import STORE, connect_store
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

NONCE_BYTES = 32
PROOF_BYTES = 32
_RANK = struct.Struct("!I")
CLAIM_BYTES = NONCE_BYTES + _RANK.size + PROOF_BYTES
"""What the worker sends."""
_WORKER, _SERVER = b"msrun worker", b"msrun parameter server"


class NotProved(ValueError):
    """The other side does not know the token, or is not who it should be."""


def new_nonce() -> bytes:
    """Return random bytes, of which every connection has its own."""
    return secrets.token_bytes(NONCE_BYTES)


def build_claim(token: bytes, server_nonce: bytes, worker_nonce: bytes, global_rank: int) -> bytes:
    """Return what a worker answers to the server's nonce."""
    rank = _RANK.pack(global_rank)
    return worker_nonce + rank + _proof(token, _WORKER, server_nonce, worker_nonce, rank)


def check_claim(token: bytes, server_nonce: bytes, claim: bytes) -> tuple[int, bytes]:
    """Return the rank and the nonce of a worker."""
    worker_nonce, rank, proof = claim[:NONCE_BYTES], claim[NONCE_BYTES:-PROOF_BYTES], claim[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, _WORKER, server_nonce, worker_nonce, rank)):
        raise NotProved("a worker without the token of this job")
    return _RANK.unpack(rank)[0], worker_nonce


def build_answer(token: bytes, server_nonce: bytes, worker_nonce: bytes, index: int) -> bytes:
    """Return what a server answers to a claim."""
    return _proof(token, _SERVER, server_nonce, worker_nonce, _RANK.pack(index))


def check_answer(token: bytes, server_nonce: bytes, worker_nonce: bytes, index: int, answer: bytes) -> None:
    """Refuse who is not parameter server `index` of this job."""
    if not hmac.compare_digest(answer, build_answer(token, server_nonce, worker_nonce, index)):
        raise NotProved("it does not know the token of this job")


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"".join(parts), "sha256")


FILE = "file://"
FIND_S = 60.0
"""How long the servers may take to start; they start with the workers."""


def _open_store() -> Store:
    place = os.environ[contract.MSRUN_RENDEZVOUS]
    if place.startswith(FILE):
        store: Store = FileStore(f"{place.removeprefix(FILE)}.servers")
    elif place.startswith(STORE):
        address, _, port = place.removeprefix(STORE).rpartition(":")
        store = connect_store(address.strip("[]"), int(port))
    else:
        store = connect_store(os.environ[contract.MASTER_ADDR], int(os.environ[contract.MASTER_PORT]))
    attempt = os.environ.get(contract.TORCHELASTIC_RESTART_COUNT, "0")
    return PrefixStore(f"servers of attempt {attempt}", store)


def publish(index: int, address: str, port: int) -> None:
    """Write down where a server listens."""
    _open_store().set(str(index), f"{address} {port}")


def find_addresses(servers: int) -> list[tuple[str, int]]:
    """Return address and port of every server, when all have started."""
    store = _open_store()
    names = [str(index) for index in range(servers)]
    try:
        store.wait(names, timedelta(seconds=FIND_S))
    except RuntimeError:
        raise WorldError(
            f"the {servers} parameter servers have not started within {FIND_S:g} s: see {contract.server_name(0)}.log "
            "and the others in the log directory"
        ) from None
    found = [store.get(name).decode().rpartition(" ") for name in names]
    return [(address, int(port)) for address, _, port in found]


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
