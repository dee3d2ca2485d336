"""How workers find the parameter servers of their job and prove who they are, and a worker's connections: one to each,
opened at the first request.

Each server writes its address into a store: on one host a file beside the workers' own, of several hosts the store in
which the workers meet, too; in a job that was started by hand the scheduler's.
"""

from __future__ import annotations

import functools
import hmac
import json
import math
import mmap
import os
import secrets
import socket
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # exported, not declared

from msrun import contract
from msrun.errors import ParallelError, WorldError
from msrun.runtime import world
from msrun.runtime.joining.meet import STORE, connect_store
from msrun.runtime.progress import waiting_in
from msrun.shm.segment import HEAD_BYTES, make_memory, open_memory

SHARE = "share"
"""The kind of request that offers memory to a server."""
LEAST_BYTES = 1 << 15
"""Smaller bodies go through the socket."""
MOST_BYTES = 1 << 27
"""So do larger ones: the memory stays for as long as the connection."""


class SharedBody:
    """The places for bodies in both directions, as one of both sides sees them.

    Args:
        descriptor: of the memory; closed here.
        size: bytes of a place.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        try:
            memory = mmap.mmap(descriptor, HEAD_BYTES + 3 * size)  # refuses a size that the memory does not have
        finally:
            os.close(descriptor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = torch.frombuffer(memory, dtype=torch.uint8)
        self.requests, self.reply = data[HEAD_BYTES:].split([2 * size, size])
        self._turn = 0

    def next_request(self) -> int:
        """Return where in `requests` the next one's body is put."""
        self._turn = self.size - self._turn
        return self._turn


def offer(wanted: int) -> tuple[int, int, dict[str, Any]]:
    """Return a descriptor of new memory, the bytes of a place in it, at least those wanted, and how a server opens it.

    Close the descriptor, by making a SharedBody of it, when the server has opened it.
    """
    size = 1 << max(20, (wanted + wanted // 4 - 1).bit_length())
    descriptor, where = make_memory(HEAD_BYTES + 3 * size)
    return descriptor, size, {"size": size, "where": where}


def accept(fields: dict[str, Any]) -> SharedBody:
    """Return the memory that a worker offers."""
    size = int(fields["size"])
    if not 0 < size <= 4 * MOST_BYTES:
        raise ValueError(f"{size} bytes")
    return SharedBody(open_memory(*fields["where"]), size)


MAGIC = b"MSP1"
PREFIX = struct.Struct("!4sIQ")
ALIGNMENT = 16
MAX_HEADER_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 30
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
"""What travels."""


DONE = "done"
ERROR = "error"
"""The kinds of replies; an error has a `text`."""


class FrameError(ValueError):
    """Bytes that are no message."""


@dataclass(frozen=True)
class Message:
    """One request or reply."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    is_lent: bool = False
    """Its tensors are in memory that the other side writes again after the next message of this one."""


def encode(message: Message, room: Tensor | None = None, begin: int = 0) -> list[memoryview]:
    """Return the pieces of a message to be sent; they share the memory of contiguous tensors of the CPU.

    Args:
        room: memory that both sides see, for the tensors; None: they are sent.
        begin: where in it they begin.
    """
    pieces: list[memoryview] = []
    described, size = [], 0
    for tensor in message.tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise FrameError(f"a tensor of {tensor.dtype} cannot be sent; one of {', '.join(_DTYPES)} can")
        described.append([name, list(tensor.shape)])
        padding = -tensor.nbytes % ALIGNMENT
        if room is not None:
            place = room[begin + size : begin + size + tensor.nbytes]
            if tensor.data_ptr() != place.data_ptr():  # it lies there already
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        else:
            data = _bytes_of(tensor)
            pieces += [data, memoryview(bytes(padding))] if padding else [data]
        size += tensor.nbytes + padding
    shared = {} if room is None else {"shared": [begin, size]}
    header = json.dumps({"kind": message.kind, **message.fields, **shared, "tensors": described}).encode()
    if len(header) > MAX_HEADER_BYTES or size > MAX_BODY_BYTES:
        raise FrameError(
            f"a message of {len(header)} bytes of header and {size} of body; at most {MAX_HEADER_BYTES} and "
            f"{MAX_BODY_BYTES} are allowed"
        )
    prefix = PREFIX.pack(MAGIC, len(header), 0 if room is not None else size)
    return [memoryview(prefix + header), *(piece for piece in pieces if piece.nbytes)]


def body_bytes(message: Message) -> int:
    """Return how many bytes the tensors of a message take."""
    return sum(tensor.nbytes + -tensor.nbytes % ALIGNMENT for tensor in message.tensors)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


class FrameReader:
    """Puts messages together from bytes as they come: `wanted` says where the next go, `advance` how many came."""

    def __init__(self, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self.room: Tensor | None = None
        """Memory that both sides see, with the tensors of messages that have no body."""
        self._begin()

    def _begin(self) -> None:
        self._header_bytes: int | None = None
        self._body_bytes = 0
        self._header: dict[str, Any] | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._expect(PREFIX.size)

    def _expect(self, size: int) -> None:
        self._buffer = torch.empty(size, dtype=torch.uint8)
        self.wanted = memoryview(self._buffer.numpy())  # type: ignore[arg-type]
        """Where the next bytes go; never empty."""

    def advance(self, count: int) -> Message | None:
        """Note that `count` bytes of `wanted` were filled; returns a message when it is complete."""
        self.wanted = self.wanted[count:]
        if self.wanted.nbytes:
            return None
        if self._header_bytes is None:
            self._read_prefix()
        elif self._header is None:
            room = 0 if self.room is None else self.room.numel()
            self._header = _parse_header(bytes(self._buffer.numpy()), self._body_bytes, room)
            if self._body_bytes:
                self._expect(self._body_bytes)
            elif "shared" in self._header and self.room is not None:
                return self._complete(self.room[self._header["shared"][0] :], is_lent=True)
            else:
                return self._complete(torch.empty(0, dtype=torch.uint8))
        else:
            return self._complete(self._buffer)
        return None

    def _read_prefix(self) -> None:
        magic, header_bytes, body_bytes = PREFIX.unpack(bytes(self._buffer.numpy()))
        if magic != MAGIC:
            raise FrameError("it does not begin as a message does")
        if not 2 <= header_bytes <= MAX_HEADER_BYTES or body_bytes > self._max_body_bytes:
            raise FrameError(f"a header of {header_bytes} bytes or a body of {body_bytes} is too long")
        self._header_bytes, self._body_bytes = header_bytes, body_bytes
        self._expect(header_bytes)

    def _complete(self, body: Tensor, *, is_lent: bool = False) -> Message:
        assert self._header is not None
        header = self._header
        tensors, begin = [], 0
        for name, shape in header.pop("tensors"):
            size = math.prod(shape) * _DTYPES[name].itemsize
            tensors.append(body[begin : begin + size].view(_DTYPES[name]).reshape(shape))
            begin += size + -size % ALIGNMENT
        header.pop("shared", None)
        message = Message(header.pop("kind"), header, tensors, is_lent)
        self._begin()
        return message


def _parse_header(data: bytes, body_bytes: int, room_bytes: int) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        raise FrameError("its header is not JSON") from None
    tensors = header.get("tensors") if isinstance(header, dict) else None
    if not isinstance(tensors, list) or not isinstance(header.get("kind"), str):
        raise FrameError("its header has no kind or no tensors")
    size = 0
    for item in tensors:
        if not (isinstance(item, list) and len(item) == 2 and item[0] in _DTYPES and _is_shape(item[1])):
            raise FrameError("its header describes a tensor that is none")
        one = math.prod(item[1]) * _DTYPES[item[0]].itemsize
        size += one + -one % ALIGNMENT
    shared = header.get("shared")
    if shared is not None:
        if body_bytes or not (_is_shape(shared) and len(shared) == 2 and sum(shared) <= room_bytes):
            raise FrameError(f"its tensors are at {shared!r} of {room_bytes} bytes that are shared")
        body_bytes = shared[1]
    if size != body_bytes:
        raise FrameError(f"its tensors have {size} bytes, its body {body_bytes}")
    return header


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 48 for size in value)


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
