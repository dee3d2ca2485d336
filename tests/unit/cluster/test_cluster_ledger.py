"""Messages over connections that break: each arrives once, in order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.cluster.messages import Ledger, Message, MessageMissing


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_every_message_arrives_once_and_in_order_however_often_the_connection_breaks(seed: int, count: int) -> None:
    draw = random.Random(seed)
    sender, receiver = Ledger(), Ledger()
    arrived: list[int] = []
    wire: list[Message] = []
    to_say = list(range(count))
    while len(arrived) < count:
        move = draw.random()
        if move < 0.4 and to_say:
            wire.append(sender.stamp({"type": "say", "number": to_say.pop(0)}))
        elif move < 0.8 and wire:
            message = wire.pop(0)
            if receiver.take(message):
                arrived.append(message["number"])
        elif move < 0.9:
            sender.acknowledge(receiver.seen)
        else:  # what is on its way is lost; the new connection begins with what was not seen
            sender.acknowledge(receiver.seen)
            wire = sender.unseen()
    assert arrived == list(range(count))


def test_message_that_comes_before_an_older_one_is_refused_and_both_come_again() -> None:
    sender, receiver = Ledger(), Ledger()
    wire = [sender.stamp({"number": number}) for number in range(5)]
    assert [receiver.take(message) for message in wire[:2]] == [True, True]
    with pytest.raises(MessageMissing, match="message 5 came after message 2"):
        receiver.take(wire[4])
    sender.acknowledge(receiver.seen)
    assert [message["number"] for message in sender.unseen() if receiver.take(message)] == [2, 3, 4]


def test_messages_are_kept_until_they_are_acknowledged() -> None:
    ledger = Ledger()
    for number in range(3):
        ledger.stamp({"number": number})
    ledger.acknowledge(2)
    assert [message["number"] for message in ledger.unseen()] == [2]
    ledger.acknowledge("nonsense")
    ledger.acknowledge(1)
    assert [message["seq"] for message in ledger.unseen()] == [3]


def test_message_without_a_number_is_always_taken() -> None:
    ledger = Ledger()
    assert ledger.take({"type": "beat"}) and ledger.take({"type": "beat"}) and ledger.seen == 0
