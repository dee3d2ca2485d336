"""Messages whose tensors lie in memory that both sides see."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from msrun.runtime.server.frames import LEAST_BYTES, FrameError, FrameReader, Message, SharedBody, accept, encode, offer


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
