"""Messages between threads: in order, and never lost."""

from __future__ import annotations

import selectors
from collections.abc import Iterator

import pytest

from msrun.cluster.own_thread import Inbox


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    found = Inbox()
    yield found
    found.close()


def test_messages_come_in_their_order(inbox: Inbox) -> None:
    for number in range(3):
        inbox.post({"n": number})
    assert [message["n"] for message in inbox.take()] == [0, 1, 2]
    assert inbox.take() == []


def test_reader_is_woken_as_long_as_there_are_messages(inbox: Inbox) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(inbox, selectors.EVENT_READ)
        for _ in range(2):
            assert not selector.select(0)
            for _ in range(2):
                inbox.post({})
            assert selector.select(0) and selector.select(0)
            assert len(inbox.take()) == 2


def test_message_for_a_reader_that_has_gone_is_left() -> None:
    found = Inbox()
    found.close()
    found.post({})
