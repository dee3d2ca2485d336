"""Messages between workers and parameter servers: a JSON header and the raw bytes of tensors.

    4 bytes  MAGIC
    4 bytes  length of the header, 8 bytes  length of the body; big-endian
    header   {"kind": ..., "tensors": [[dtype, shape], ...], ...}, UTF-8
    body     the tensors one after the other, C order, native byte order, each from a multiple of ALIGNMENT on

With "shared", [begin, size], in the header there is no body: the tensors are there in memory that both sides see.
Nothing in a message can name code to be run. Lengths are bounded before memory is taken for them.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
