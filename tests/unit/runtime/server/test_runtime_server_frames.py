"""Messages between workers and parameter servers: everything comes back, and nothing else is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msrun.runtime.server.frames import (
    MAGIC,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PREFIX,
    FrameError,
    FrameReader,
    Message,
    encode,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool)
TENSORS = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=4)


def read(data: bytes, cuts: list[int]) -> list[Message]:
    """Feed bytes in chunks of these sizes, over and over."""
    reader, found, sizes = FrameReader(), [], cuts or [len(data)]
    number = 0
    while data:
        count = min(len(data), sizes[number % len(sizes)], reader.wanted.nbytes)
        reader.wanted[:count] = data[:count]
        message = reader.advance(count)
        data, number = data[count:], number + 1
        found += [message] if message is not None else []
    assert reader._header_bytes is None and reader.wanted.nbytes == PREFIX.size, "no message is begun"
    return found


def frame(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(MAGIC, len(text), len(body)) + text + body


@given(TENSORS, st.lists(st.integers(1, 50), max_size=5), st.integers(1, 3))
def test_messages_come_back_as_they_were_however_they_are_cut(
    described: list[tuple[torch.dtype, list[int]]], cuts: list[int], times: int
) -> None:
    tensors = [(torch.rand(shape) * 100).to(dtype) for dtype, shape in described]
    message = Message("step", {"shard": [1, 2], "text": "ü"}, tensors)
    data = b"".join(bytes(piece) for piece in encode(message)) * times
    found = read(data, cuts)
    assert len(found) == times
    for one in found:
        assert (one.kind, one.fields) == ("step", message.fields)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one.tensors, tensors, strict=True))


def test_transposed_tensor_travels_as_its_elements() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()[::2]
    data = b"".join(bytes(piece) for piece in encode(Message("put", {}, [tensor])))
    assert torch.equal(read(data, [])[0].tensors[0], tensor)


@given(st.binary(max_size=200))
def test_bytes_of_strangers_are_an_error_or_no_message(data: bytes) -> None:
    reader = FrameReader()
    try:
        while data:
            count = min(len(data), reader.wanted.nbytes)
            reader.wanted[:count] = data[:count]
            assert reader.advance(count) is None
            data = data[count:]
    except FrameError:
        pass


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_headers_that_describe_no_tensors_are_refused(header: Any) -> None:
    if isinstance(header, dict) and isinstance(header.get("kind"), str) and isinstance(header.get("tensors"), list):
        return
    with pytest.raises(FrameError):
        read(frame(header), [])


@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(b"GET ", 10, 10),
        PREFIX.pack(MAGIC, MAX_HEADER_BYTES + 1, 0),
        PREFIX.pack(MAGIC, 2, MAX_BODY_BYTES + 1),
        PREFIX.pack(MAGIC, 0, 0),
        frame(b"[" * 100000),
        frame({"kind": "step", "tensors": [["float32", [4]]]}, bytes(8)),
        frame({"kind": "step", "tensors": [["float32", [-4, -1]]]}, bytes(16)),
        frame({"kind": "step", "tensors": [["float32", [1.0]]]}, bytes(16)),
        frame({"kind": "step", "tensors": [["float32", [True]]]}, bytes(16)),
        frame({"kind": "step", "tensors": [["object", [1]]]}, bytes(16)),
        frame({"kind": "step", "tensors": [["float32", [1 << 60]]]}, bytes(16)),
        frame({"kind": 3, "tensors": []}),
    ],
)
def test_wrong_frames_are_refused_before_memory_is_taken_for_them(data: bytes) -> None:
    with pytest.raises(FrameError):
        read(data, [])


def test_what_is_too_long_is_not_sent() -> None:
    with pytest.raises(FrameError, match="bytes of header"):
        encode(Message("put", {"text": "x" * MAX_HEADER_BYTES}))
    with pytest.raises(FrameError, match="complex64 cannot be sent"):
        encode(Message("put", {}, [torch.zeros(2, dtype=torch.complex64)]))
