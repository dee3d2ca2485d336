"""Messages arrive whole and in order however the stream is cut, and nothing without a limit is taken."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.cluster.messages import HEADER, MAX_MESSAGE_BYTES, Channel, MessageBuffer, encode_message

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters())
objects = st.dictionaries(
    st.text(max_size=5), st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6), max_size=4
)


@given(st.lists(objects, max_size=5), st.data())
def test_messages_survive_any_cut_of_the_stream(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    stream = b"".join(encode_message(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    buffer = MessageBuffer()
    received = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += buffer.feed(stream[begin:end])
    assert received == messages


def test_message_comes_with_its_last_byte() -> None:
    buffer = MessageBuffer()
    stream = encode_message({"type": "x"})
    assert [buffer.feed(stream[i : i + 1]) for i in range(len(stream))] == [*[[]] * (len(stream) - 1), [{"type": "x"}]]


def test_bytes_of_arguments_that_are_no_text_survive() -> None:
    assert MessageBuffer().feed(encode_message({"arg": "a\udcff\n☃"})) == [{"arg": "a\udcff\n☃"}]


@pytest.mark.parametrize("body", [b"[]", b"1", b"null", b'"text"', b"{", b"", b"\xff"])
def test_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        MessageBuffer().feed(HEADER.pack(len(body)) + body)


def test_announced_length_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="at most"):
        MessageBuffer().feed(HEADER.pack(MAX_MESSAGE_BYTES + 1))


def test_message_beyond_the_limit_is_not_sent() -> None:
    with pytest.raises(ValueError, match="at most"):
        encode_message({"text": "x" * MAX_MESSAGE_BYTES})


@given(st.binary(max_size=64))
def test_any_bytes_give_messages_or_a_value_error(data: bytes) -> None:
    try:
        messages = MessageBuffer().feed(data)
    except ValueError:
        return
    assert all(isinstance(message, dict) for message in messages)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair()
    yield Channel(left), Channel(right)
    left.close()
    right.close()


def test_channel_carries_messages_both_ways(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    assert left.send({"n": 1}) and left.send({"n": 2}) and right.send({"n": 3})
    assert right.receive() == [{"n": 1}, {"n": 2}]
    assert left.receive() == [{"n": 3}]


def test_channel_sees_the_other_end_go(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    right.send({"last": True})
    right.close()
    assert left.receive() == [{"last": True}]
    assert not left.is_closed
    assert left.receive() == []
    assert left.is_closed
    assert left.send({"n": 1}) is False


def test_json_on_the_wire_is_plain_ascii() -> None:
    body = encode_message({"text": "☃"})[HEADER.size :]
    assert body.isascii()
    assert json.loads(body) == {"text": "☃"}
