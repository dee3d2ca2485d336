"""A connection between a host and the scheduler: what comes while nobody is trusted yet, and after."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from msrun.cluster.connection import MAX_GREETING_BYTES, Connection
from msrun.cluster.proof import Seal, new_nonce

TOKEN = b"a token of this job"


@pytest.fixture
def sides() -> Iterator[tuple[Connection, Connection]]:
    """The scheduler's end and a host's, which have greeted each other."""
    scheduler, host = map(Connection, socket.socketpair())
    ours, theirs = new_nonce(), new_nonce()
    scheduler.agree(Seal(TOKEN, ours, theirs, is_scheduler=True))
    host.agree(Seal(TOKEN, ours, theirs, is_scheduler=False))
    yield scheduler, host
    scheduler.close()
    host.close()


def test_what_follows_the_word_that_lets_a_host_in_is_read_by_whoever_reads_next(
    sides: tuple[Connection, Connection],
) -> None:
    scheduler, host = sides
    long = b"x" * (2 * MAX_GREETING_BYTES)
    for body in (b"accepted", long, b"called off"):
        scheduler.send_body(body)
    (first,) = host.receive()
    assert host.unseal(first) == b"accepted"
    host.trust()
    assert [host.unseal(body) for body in host.receive()] == [long, b"called off"]


def test_what_was_said_before_the_other_side_went_is_read_after_a_send_has_failed(
    sides: tuple[Connection, Connection],
) -> None:
    scheduler, host = sides
    scheduler.send_body(b"called off")
    scheduler.close()
    host.send_body(b"a log")
    host.send_body(b"a log")
    assert (host.is_closed, host.has_unsent) == (False, False)
    assert [host.unseal(body) for body in host.receive()] == [b"called off"]
    assert (host.receive(), host.is_closed) == ([], True)
