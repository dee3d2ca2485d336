"""A process that comes to a meeting: finds the keeper, says who it is, and is given its place."""

from __future__ import annotations

import random
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from msrun.errors import WorldError
from msrun.runtime.joining.lines import LineStream
from msrun.runtime.joining.registry import Request, Seat
from msrun.runtime.joining.spec import Meeting

REPORT_EVERY_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_CONNECT_S = 5.0
_MORE_THAN_KEEPER_S = 15.0
"""The keeper's time may have begun later; its answer, which names the missing, is better than a time-out here."""


@dataclass(frozen=True)
class Registration:
    """A process's place, and what it needs to join the others."""

    seat: Seat
    keeper_address: str
    """Where this process reaches the keeper, and its store."""
    store_port: int
    own_address: str
    """This host's address for the others."""
    stream: LineStream
    """To the keeper; open."""
    token: str = ""
    """By which workers and parameter servers know each other."""


def register(
    meeting: Meeting, request: Request, limit_s: float, silence_s: int, source_address: str = ""
) -> Registration:
    """Register with the keeper of a meeting, which may not be there yet.

    Args:
        silence_s: after how long without a sign of life the keeper's host counts as lost.
        source_address: which of this host's addresses to use; empty leaves it to the system.

    Raises:
        WorldError: nobody keeps the meeting, not everybody came in time, or this process is refused.
    """
    end = time.monotonic() + limit_s
    stream = LineStream(_connect(meeting, request, end, limit_s, source_address))
    stream.watch_for_silence(silence_s)
    stream.send(request.to_json())
    own, peer = (str(pair[0]) for pair in (stream.socket.getsockname(), stream.socket.getpeername()))
    message = _await_answer(meeting, stream, end, limit_s)
    for word, told in (("refused", "has refused this process"), ("failed", "ends the job")):
        if word in message:
            stream.close()
            raise WorldError(f"{meeting.keeper} at {meeting.place} {told}: {message[word]}")
    address = message["address"] if own == peer and message["address"] else own
    return Registration(Seat(**message["seat"]), peer, message["store_port"], address, stream, message.get("token", ""))


def _connect(meeting: Meeting, request: Request, end: float, limit_s: float, source_address: str) -> socket.socket:
    pause_s = _FIRST_PAUSE_S
    report_at = time.monotonic() + REPORT_EVERY_S
    while True:
        reason = ""
        for address in meeting.addresses:
            try:
                wait_s = max(0.1, min(_CONNECT_S / len(meeting.addresses), end - time.monotonic()))
                source = (source_address, 0) if source_address else None
                connection = socket.create_connection((address, meeting.port), wait_s, source)
            except (OSError, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                continue
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()  # a free port of the own host may be given to the very socket that asks for it
        now = time.monotonic()
        if now >= end:
            raise WorldError(
                f"{meeting.keeper} was not at {meeting.place} ({meeting.named_by}) within {limit_s:g} s ({reason}): "
                "start it, or correct the address and port"
            )
        if now >= report_at:
            who = f"rank {request.global_rank}" if request.global_rank >= 0 else "a worker"
            sys.stderr.write(f"msrun: {who} waits for {meeting.keeper} at {meeting.place} ({reason})\n")
            report_at = now + REPORT_EVERY_S
        time.sleep(min(pause_s * random.uniform(0.5, 1.0), max(0.0, end - now)))  # noqa: S311
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _await_answer(meeting: Meeting, stream: LineStream, end: float, limit_s: float) -> dict[str, Any]:
    wait_s = end + _MORE_THAN_KEEPER_S - time.monotonic()
    stream.socket.settimeout(None if wait_s == float("inf") else wait_s)
    try:
        while True:
            messages = stream.receive()
            if messages:
                return messages[0]
            if messages is None:
                told = "has closed the connection: it has ended, or another program listens there"
                break
    except TimeoutError:
        told = f"has not answered within {limit_s:g} s: not everybody came, or another program listens there"
    except ValueError as error:
        told = f"has answered with {error}: another program listens there"
    stream.close()
    raise WorldError(f"{meeting.keeper} at {meeting.place} ({meeting.named_by}) {told}")
