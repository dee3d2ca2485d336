"""Messages of parameter servers: frames, pieces of tables, bodies in shared memory."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from msrun.runtime.server import remote
from msrun.runtime.server.frames import (
    LEAST_BYTES,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PREFIX,
    FrameError,
    FrameReader,
    Message,
    SharedBody,
    accept,
    encode,
    offer,
)
from msrun.runtime.server.remote import Piece, cut_rows, cut_table, named_rows, number_rows, split_numbers

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool)
TENSORS = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=4)


def read_frame(data: bytes, cuts: list[int]) -> list[Message]:
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
    found = read_frame(data, cuts)
    assert len(found) == times
    for one in found:
        assert (one.kind, one.fields) == ("step", message.fields)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one.tensors, tensors, strict=True))


def test_transposed_tensor_travels_as_its_elements() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()[::2]
    data = b"".join(bytes(piece) for piece in encode(Message("put", {}, [tensor])))
    assert torch.equal(read_frame(data, [])[0].tensors[0], tensor)


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
        read_frame(frame(header), [])


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
        read_frame(data, [])


def test_what_is_too_long_is_not_sent() -> None:
    with pytest.raises(FrameError, match="bytes of header"):
        encode(Message("put", {"text": "x" * MAX_HEADER_BYTES}))
    with pytest.raises(FrameError, match="complex64 cannot be sent"):
        encode(Message("put", {}, [torch.zeros(2, dtype=torch.complex64)]))


SHAPES = st.lists(st.integers(1, 200), max_size=3)


def all_rows(cut: tuple[Piece, ...]) -> list[int]:
    return sorted(row for piece in cut for row in piece.rows)


@given(SHAPES, st.integers(1, 5), st.integers(0, 4))
def test_every_row_is_on_one_server(shape: list[int], servers: int, first: int) -> None:
    cut = cut_rows(shape, torch.float64, servers, first % servers)
    assert all_rows(cut) == list(range(shape[0] if shape else 1))
    assert [piece.number for piece in cut] == list(range(len(cut)))
    is_small = math.prod(shape) * 8 <= remote.SMALL_BYTES
    assert len(cut) == (1 if is_small else max(1, min(servers, shape[0])))
    if not is_small and shape[0] >= servers:
        assert {piece.server for piece in cut} == set(range(servers))


@given(st.integers(1, 50), st.integers(1, 6))
def test_rows_of_a_table_take_turns(rows: int, servers: int) -> None:
    cut = cut_table(rows, servers)
    assert all_rows(cut) == list(range(rows))
    assert all(row % servers == piece.server for piece in cut for row in piece.rows)


@given(st.integers(1, 60), st.integers(1, 5), st.data())
def test_rows_are_found_by_their_numbers_in_the_whole(rows: int, servers: int, data: st.DataObject) -> None:
    whole = torch.arange(rows) * 10
    names = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), unique=True)), dtype=torch.int64)
    begin = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(begin, rows))
    for cut in (
        cut_table(rows, servers),
        tuple(Piece(0, n, *bounds) for n, bounds in enumerate([(0, rows // 2), (rows // 2, rows)])),
    ):
        numbers = number_rows(cut, names).sort().values
        assert torch.equal(named_rows(cut, numbers).sort().values, names.sort().values)
        found, inside = torch.zeros_like(names), []
        for piece, part, own_numbers in split_numbers(cut, numbers):
            own = piece.of(whole)
            assert len(own) == len(piece.rows)
            found[part] = own[own_numbers]
            inside += [piece.rows[number] for number in piece.overlap(begin, end)]
        assert torch.equal(found, named_rows(cut, numbers) * 10)
        assert sorted(inside) == list(range(begin, end))


def read(reader: FrameReader, pieces: list[memoryview]) -> Message:
    found = None
    for byte in b"".join(pieces):
        reader.wanted[:1] = bytes([byte])
        found = reader.advance(1)
    assert found is not None
    return found


def both_sides() -> tuple[SharedBody, SharedBody]:
    descriptor, size, fields = offer(3 * LEAST_BYTES)
    server = accept(fields)
    return SharedBody(descriptor, size), server


def test_two_requests_and_a_reply_have_places_of_their_own() -> None:
    worker, server = both_sides()
    there, back = FrameReader(), FrameReader()
    there.room, back.room = server.requests, worker.reply
    given = [[torch.arange(5), torch.full((3, 4), float(number))] for number in range(3)]
    messages = []
    for tensors in given[:2]:
        pieces = encode(Message("step", {"x": 1}, tensors), worker.requests, worker.next_request())
        assert len(pieces) == 1, "nothing but the header travels"
        messages.append(read(there, pieces))
    reply = read(back, encode(Message("done", {}, given[2]), server.reply))
    for message, tensors in zip([*messages, reply], given, strict=True):
        assert message.is_lent
        assert "shared" not in message.fields
        for one, other in zip(message.tensors, tensors, strict=True):
            assert torch.equal(one, other)


def test_a_reply_that_was_made_in_its_place_is_not_copied() -> None:
    _, server = both_sides()
    made = server.reply[:80].view(torch.float64).fill_(2.0)
    encode(Message("done", {}, [made]), server.reply)
    assert torch.equal(server.reply[:80].view(torch.float64), torch.full((10,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("shared", [[0, 17], [64, 16], [-16, 16], [0], "0", [0, 16, 0], [0.0, 16]])
def test_places_outside_the_memory_are_refused(shared: Any) -> None:
    reader = FrameReader()
    reader.room = torch.zeros(64, dtype=torch.uint8)
    header = Message("step", {"shared": shared}, ())
    pieces = encode(header)
    with pytest.raises(FrameError, match=r"shared|its tensors have"):
        read(reader, pieces)


def test_without_memory_a_message_must_have_its_body() -> None:
    room: Tensor = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(FrameError, match="shared"):
        read(FrameReader(), encode(Message("step", {}, [torch.ones(4)]), room))


def test_memory_of_others_and_of_other_sizes_is_refused() -> None:
    descriptor, _, fields = offer(LEAST_BYTES)
    host, pid, number, secret = fields["where"]
    for where, text in (
        ([["other", "pid:[1]"], pid, number, secret], "another machine"),
        ([host, pid, number, "0" * 32], "other memory than was said"),
        ([host, pid, 1 << 20, secret], "No such file"),
    ):
        with pytest.raises(RuntimeError, match=text):
            accept({**fields, "where": where})
    with pytest.raises(ValueError, match="mmap length is greater"):
        accept({**fields, "size": fields["size"] * 2})
    with pytest.raises(ValueError, match="0 bytes"):
        accept({**fields, "size": 0})
    os.close(descriptor)
