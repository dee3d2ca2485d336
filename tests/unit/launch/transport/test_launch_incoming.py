"""Bytes of an agent, as messages, however they are cut."""

from __future__ import annotations

import pytest

from msrun.cluster.messages import encode_message
from msrun.launch.transport import event_loop as module
from msrun.launch.transport.event_loop import Incoming
from msrun.launch.transport.pipe import MARKER

SAID = [{"type": "hello", "seq": 1}, {"type": "log", "data": "x" * 300}]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_are_whole_whatever_the_pieces_are(size: int) -> None:
    data = b"Welcome!\n" + MARKER[:4] + MARKER + b"".join(map(encode_message, SAID))
    incoming, found = Incoming(), []
    for begin in range(0, len(data), size):
        found += incoming.feed(data[begin : begin + size])
    assert found == SAID and incoming.noise == "" and not incoming.is_noise
    assert incoming.unacknowledged == sum(len(encode_message(message)) for message in SAID)


def test_noise_without_an_agent_is_kept_as_far_as_it_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NOISE_BYTES", 10)
    incoming = Incoming()
    assert incoming.feed(b"not found") == [] and not incoming.is_noise
    incoming.feed(b"!!" * 1000)
    assert incoming.is_noise and incoming.noise == "!" * 10
