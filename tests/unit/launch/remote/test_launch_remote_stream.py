"""One connection of an agent: nobody waits for the other side, and what it says is read whole."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from msrun.cluster.messages import Message, MessageBuffer, encode_message
from msrun.launch.remote.launcher_link import Stream
from msrun.launch.transport.pipe import MARKER


@pytest.fixture
def sides() -> Iterator[tuple[Stream, socket.socket]]:
    """An agent's stream and the socket of its launcher."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(0.0)
    descriptor = ours.detach()
    stream = Stream(descriptor, descriptor)
    yield stream, theirs
    stream.close()
    theirs.close()


def read_all(launcher: socket.socket) -> bytes:
    text = b""
    while True:
        try:
            data = launcher.recv(1 << 20)
        except BlockingIOError:
            return text
        if not data:
            return text
        text += data


def test_what_does_not_fit_is_counted_and_sent_when_there_is_room(sides: tuple[Stream, socket.socket]) -> None:
    stream, launcher = sides
    assert stream.unsent_bytes == len(MARKER)
    message: Message = {"type": "log", "text": "x" * (8 << 20)}
    stream.send(message)
    assert 0 < stream.unsent_bytes < len(encode_message(message))
    text = b""
    while stream.unsent_bytes:
        text += read_all(launcher)
        stream.flush()
    text += read_all(launcher)
    assert text.startswith(MARKER)
    assert list(MessageBuffer().feed(text[len(MARKER) :])) == [message]


def test_messages_are_returned_whole_and_nothing_is_waited_for(sides: tuple[Stream, socket.socket]) -> None:
    stream, launcher = sides
    assert stream.receive() == []
    data = encode_message({"type": "job"}) + encode_message({"type": "start"})
    launcher.sendall(data[:-3])
    assert stream.receive() == [{"type": "job"}]
    launcher.sendall(data[-3:])
    assert stream.receive() == [{"type": "start"}]
    assert not stream.is_closed


@pytest.mark.parametrize("noise", [b"", b"\xff" * 64])
def test_connection_is_closed_at_its_end_and_by_what_is_no_message(
    sides: tuple[Stream, socket.socket], noise: bytes
) -> None:
    stream, launcher = sides
    launcher.sendall(noise)
    launcher.shutdown(socket.SHUT_WR)
    assert stream.receive() == []
    assert stream.is_closed


def test_what_a_launcher_has_said_before_it_went_is_read_after_a_send_has_failed(
    sides: tuple[Stream, socket.socket],
) -> None:
    stream, launcher = sides
    launcher.sendall(encode_message({"type": "called_off"}))
    launcher.close()
    stream.send({"type": "log"})
    stream.send({"type": "log"})
    assert (stream.unsent_bytes, stream.is_closed) == (0, False)
    assert stream.receive() == [{"type": "called_off"}]
    assert (stream.receive(), stream.is_closed) == ([], True)
