"""Messages between threads: in order, never lost, and no more of a stranger's than somebody reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from msrun.cluster import inbox as module
from msrun.cluster.inbox import MAX_WAITING, Inbox


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


def test_one_who_floods_waits_until_somebody_has_read(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM_S", 60.0)
    count = 3 * MAX_WAITING

    def flood() -> None:
        for number in range(count):
            inbox.await_room()
            inbox.post({"n": number})

    thread = threading.Thread(target=flood)
    thread.start()
    seen: list[int] = []
    most = 0
    while len(seen) < count:
        taken = inbox.take()
        most = max(most, len(taken))
        seen += [message["n"] for message in taken]
    thread.join()
    assert seen == list(range(count)) and most <= MAX_WAITING


def test_nobody_waits_for_a_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM_S", 60.0)
    found = Inbox()
    for _ in range(MAX_WAITING):
        found.post({})
    thread = threading.Thread(target=found.await_room)
    thread.start()
    found.close()
    thread.join(10)
    assert not thread.is_alive()
    found.post({})
