"""The keeper of a meeting: takes the processes of a world in, says who is missing, and gives everybody a place."""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from msrun.runtime.joining.lines import LineStream
from msrun.runtime.joining.registry import Refused, Registry, Request, Seat
from msrun.runtime.joining.spec import join_place

REPORT_EVERY_S = 5.0
PATIENCE_S = 10.0
"""For one that connects to say who it is, and for one that does not read."""
MAX_STRANGERS = 128
"""Those who have not said who they are, well under the usual limit of 1024 descriptors."""
MAX_STRANGERS_OF_ONE = 64
"""Of them, from one address, where many processes of one host may come at a time; then the oldest has to go."""
MAX_NOTED = 100
"""Addresses whose refusals are told; a flood of them must not fill a disk."""
MAX_NOTES_OF_ONE = 10
"""Refusals of one address that are told. Those who say who they are count apart: no stranger takes their place."""
_OWN_NUMBER = 0


class Registrar:
    """Keeps the connections of all members; one thread uses it."""

    def __init__(self, listener: socket.socket, registry: Registry, role: str, silence_s: int) -> None:
        """Take over a listening socket.

        Args:
            role: who keeps the meeting, for what is written to stderr: "scheduler" or "rank 0".
            silence_s: after how long without a sign of life a member's host counts as lost.
        """
        self.place = join_place(*listener.getsockname()[:2])
        self.reached_at = ""
        """This host's address as other hosts use it, once one has come."""
        self._listener = listener
        self._registry = registry
        self._role = role
        self._silence_s = silence_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[LineStream, tuple[str, float]] = {}
        self._members: dict[LineStream, int] = {}
        self._newest = _OWN_NUMBER
        self._notes: Counter[tuple[str, bool]] = Counter()
        """(address, whether they have said who they are) -> how often they were refused."""

    def say(self, text: str) -> None:
        """Write a line to stderr."""
        sys.stderr.write(f"msrun: {self._role} at {self.place}: {text}\n")
        sys.stderr.flush()

    def register_self(self, request: Request, address: str) -> None:
        """Register the keeper as a member; `answer()` returns its seat."""
        self._registry.admit(_OWN_NUMBER, request, address)

    def gather(self, limit_s: float) -> str:
        """Wait until all have come. Returns who is missing at the limit, else nothing; a line tells it now and then."""
        end = time.monotonic() + limit_s
        report_at = time.monotonic() + REPORT_EVERY_S
        while not self._registry.is_complete:
            now = time.monotonic()
            if now >= end:
                return self._registry.describe_missing()
            if now >= report_at:
                self.say(self._registry.describe_missing())
                report_at = now + REPORT_EVERY_S
            self._handle(min(end, report_at) - now, self._forget)
        return ""

    def answer(self, store_port: int, token: str = "") -> Seat | None:
        """Tell every member its seat and the port of the store; returns the keeper's own seat, if it has one.

        Args:
            token: by which workers and parameter servers are to know each other.
        """
        seats = self._registry.assign()
        shared = {"store_port": store_port, "address": self.reached_at, "token": token}
        for stream, number in self._members.items():
            stream.send({"seat": asdict(seats[number]), **shared})
        return seats.get(_OWN_NUMBER)

    def watch(self) -> str:
        """Wait until all workers have left, and tell the servers.

        Returns:
            Who ended without leaving, at once; empty when all went well.
        """
        lost: list[str] = []

        def lose(stream: LineStream, number: int) -> None:
            lost.append(self._registry.describe(number))
            self._drop(stream)

        while not lost and any(map(self._registry.is_worker, self._members.values())):
            self._handle(None, lose)
        if not lost:
            for stream in self._members:
                stream.send({"over": True})
        return lost[0] if lost else ""

    def fail(self, reason: str) -> None:
        """Tell all members that the job has failed."""
        for stream in self._members:
            stream.send({"failed": reason})

    def close(self) -> None:
        """Close the listener and all connections."""
        for stream in [*self._members, *self._strangers]:
            self._drop(stream)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._selector.close()

    def _handle(self, timeout_s: float | None, when_gone: Callable[[LineStream, int], None]) -> None:
        """Handle what comes within `timeout_s` at most."""
        if self._strangers:
            timeout_s = min(PATIENCE_S, PATIENCE_S if timeout_s is None else timeout_s)
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            else:
                assert isinstance(key.fileobj, LineStream)
                self._read(key.fileobj, when_gone)
        late = [stream for stream, (_, since) in self._strangers.items() if time.monotonic() - since > PATIENCE_S]
        for stream in late:
            self._refuse(stream, f"has not said within {PATIENCE_S:g} s who it is")

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError:
            return
        self._make_room(str(peer[0]))
        connection.settimeout(PATIENCE_S)
        address = str(connection.getsockname()[0])
        if peer[0] != address:
            self.reached_at = self.reached_at or address
        stream = LineStream(connection)
        stream.watch_for_silence(self._silence_s)
        self._strangers[stream] = (str(peer[0]), time.monotonic())
        self._selector.register(stream, selectors.EVENT_READ)

    def _make_room(self, address: str) -> None:
        same = [stream for stream, (host, _) in self._strangers.items() if host == address]
        if len(same) >= MAX_STRANGERS_OF_ONE:
            self._drop(same[0])
        elif len(self._strangers) >= MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _read(self, stream: LineStream, when_gone: Callable[[LineStream, int], None]) -> None:
        number = self._members.get(stream)
        if number is None and stream not in self._strangers:  # it had to make room a moment ago
            return
        try:
            messages = stream.receive()
        except (ValueError, TimeoutError) as error:
            if number is None:
                self._refuse(stream, str(error))
                return
            messages = None
        if messages is None:
            if number is None:
                self._drop(stream)
            else:
                when_gone(stream, number)
            return
        for message in messages:
            if number is not None and "left" in message:
                self._drop(stream)
                return
            if number is None:
                number = self._admit(stream, message)
                if number is None:
                    return

    def _admit(self, stream: LineStream, message: dict[str, Any]) -> int | None:
        address = self._strangers[stream][0].partition("%")[0]
        request = None
        try:
            request = Request.from_json(message)
            self._registry.admit(self._newest + 1, request, address)
        except Refused as refusal:
            self._refuse(stream, str(refusal), is_known=request is not None)
            return None
        self._newest += 1
        del self._strangers[stream]
        self._members[stream] = self._newest
        return self._newest

    def _refuse(self, stream: LineStream, reason: str, *, is_known: bool = False) -> None:
        """`is_known`: it has said who it is."""
        self._note_refusal(self._strangers[stream][0], reason, is_known=is_known)
        stream.send({"refused": reason})
        self._drop(stream)

    def _note_refusal(self, address: str, reason: str, *, is_known: bool) -> None:
        key = address, is_known
        if key not in self._notes and sum(known == is_known for _, known in self._notes) >= MAX_NOTED:
            return
        self._notes[key] += 1
        if self._notes[key] <= MAX_NOTES_OF_ONE:
            self.say(f"refused {address}: {reason}")
        if self._notes[key] == MAX_NOTES_OF_ONE:
            self.say(f"{address} was refused {MAX_NOTES_OF_ONE} times; no more of it is told")

    def _forget(self, stream: LineStream, number: int) -> None:
        self.say(f"{self._registry.remove(number)} has gone again")
        self._drop(stream)

    def _drop(self, stream: LineStream) -> None:
        self._selector.unregister(stream)
        self._strangers.pop(stream, None)
        self._members.pop(stream, None)
        stream.close()
