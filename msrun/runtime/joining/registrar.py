"""The keeper of a meeting: takes the processes of a world in, says who is missing, and gives everybody a place."""

from __future__ import annotations

import ipaddress
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from msrun import contract
from msrun.runtime.joining.network import LineStream
from msrun.runtime.joining.spec import join_place

PROTOCOL = 1
SHOWN_HOSTS = 8
MAX_NAME = 1024
MAX_PROTOCOL = 1 << 16
_ROLES = {contract.ROLE_WORKER: "worker", contract.ROLE_SERVER: "parameter server"}
"""Who may come -> the word for it."""


class Refused(Exception):
    """This one does not belong here; the message says why."""


@dataclass(frozen=True)
class Request:
    """What a process says of itself when it comes."""

    key: str
    """Of its job."""
    world_size: int
    global_rank: int
    """-1 when it wants to be given one."""
    name: str
    """Who it is, for people: MS_NODE_ID, process id and host."""
    protocol: int = PROTOCOL
    role: str = contract.ROLE_WORKER
    """Or ROLE_SERVER: a parameter server, whose rank is its number among the servers."""

    def to_json(self) -> dict[str, Any]:
        """Return the request as a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Request:
        """Return the request of a message.

        Raises:
            Refused: the message is none of a process like this one.
        """
        protocol = message.get("protocol")
        if protocol != PROTOCOL:
            shown = protocol if type(protocol) is int and abs(protocol) < MAX_PROTOCOL else "none"
            raise Refused(f"no process of msrun's runtime, or of another version (protocol {shown})")
        key, name = message.get("key"), message.get("name")
        size, rank = message.get("world_size"), message.get("global_rank")
        if not (isinstance(key, str) and isinstance(name, str) and isinstance(size, int) and isinstance(rank, int)):
            raise Refused("its message is incomplete")
        if len(name) > MAX_NAME or not name.isprintable():
            raise Refused("its name is none")
        role = message.get("role", contract.ROLE_WORKER)
        if role not in _ROLES:
            raise Refused("its role is none")
        return cls(key, size, rank, name, role=role)


@dataclass(frozen=True)
class Seat:
    """A process's place in the world."""

    global_rank: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class _Member:
    request: Request
    address: str


class Registry:
    """The members of one world, and its parameter servers, by number in the order of their coming."""

    def __init__(self, key: str, world_size: int, servers: int = 0) -> None:
        self._sizes = {contract.ROLE_WORKER: world_size, contract.ROLE_SERVER: servers}
        self._key = key
        self._members: dict[int, _Member] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all have come."""
        return len(self._members) == sum(self._sizes.values())

    def admit(self, number: int, request: Request, address: str) -> None:
        """Take a member in.

        Args:
            number: of the member, higher than those before.
            address: its numeric address.

        Raises:
            Refused: it belongs to another job, or its place is taken.
        """
        world_size, size = self._sizes[contract.ROLE_WORKER], self._sizes[request.role]
        rank, what = request.global_rank, "rank" if request.role == contract.ROLE_WORKER else "number"
        if request.world_size != world_size:
            raise Refused(f"it says that the world has {request.world_size} ranks, but here it has {world_size}")
        if request.key != self._key:
            raise Refused("it belongs to another job, which should have a port of its own")
        if size and not -1 <= rank < size:
            raise Refused(f"its {what} is {rank}, but here {what}s are 0 to {size - 1}")
        peers = self._of_role(request.role).values()
        if len(peers) == size:
            raise Refused(f"an extra {_ROLES[request.role]}: all {size} have come")
        taken = [member for member in peers if rank != -1 and member.request.global_rank == rank]
        if taken:
            raise Refused(f"{what} {rank} is taken by {self._describe(taken[0])}")
        self._members[number] = _Member(request, address)

    def _of_role(self, role: str) -> dict[int, _Member]:
        return {number: member for number, member in self._members.items() if member.request.role == role}

    def is_worker(self, number: int) -> bool:
        """Return whether a member is a rank of the world."""
        return self._members[number].request.role == contract.ROLE_WORKER

    def remove(self, number: int) -> str:
        """Forget a member, and return who it was."""
        return self._describe(self._members.pop(number))

    def describe(self, number: int) -> str:
        """Return who a member is: its rank, its name and its address."""
        return self._describe(self._members[number])

    def assign(self) -> dict[int, Seat]:
        """Return everybody's place; to be called when all have come. A server's rank is its number.

        Who asked for a rank has it. The others get those that are left, by the numeric address of their host and there
        in the order of their coming, so that the ranks of a host stand together (MindSpore sorts hosts in that way).
        """
        return {number: seat for role in _ROLES for number, seat in self._assign(role).items()}

    def _assign(self, role: str) -> dict[int, Seat]:
        ranks = {number: member.request.global_rank for number, member in self._of_role(role).items()}
        free = iter(sorted(set(range(self._sizes[role])) - set(ranks.values())))
        for number in sorted(ranks, key=lambda number: (_order(self._members[number].address), number)):
            if ranks[number] == -1:
                ranks[number] = next(free)
        for number, rank in ranks.items():
            member = self._members[number]
            self._members[number] = replace(member, request=replace(member.request, global_rank=rank))
        locals_: dict[str, list[int]] = {}
        for number in sorted(ranks, key=ranks.__getitem__):
            locals_.setdefault(self._members[number].address, []).append(number)
        return {
            number: Seat(ranks[number], local_rank, len(numbers))
            for numbers in locals_.values()
            for local_rank, number in enumerate(numbers)
        }

    def describe_missing(self) -> str:
        """Return "2 of 4 registered, missing: ranks 2-3; came: 10.0.0.1 with 2"."""
        members = self._members.values()
        missing = " and ".join(filter(None, map(self._describe_missing, _ROLES)))
        counts = Counter(member.address for member in members)
        came = [f"{address} with {counts[address]}" for address in sorted(counts, key=_order)]
        more = f" and {len(came) - SHOWN_HOSTS} more" if len(came) > SHOWN_HOSTS else ""
        told = f"; came: {', '.join(came[:SHOWN_HOSTS])}{more}" if came else ""
        return f"{len(members)} of {sum(self._sizes.values())} registered, missing: {missing}{told}"

    def _describe_missing(self, role: str) -> str:
        peers, size = self._of_role(role).values(), self._sizes[role]
        asked = {member.request.global_rank for member in peers}
        count = size - len(peers)
        if count and role == contract.ROLE_WORKER and asked and -1 not in asked:
            return describe_ranks(set(range(size)) - asked)
        return f"{count} more {_ROLES[role]}{'s' if count > 1 else ''}" if count else ""

    def _describe(self, member: _Member) -> str:
        rank, word = member.request.global_rank, _ROLES[member.request.role]
        known = f"rank {rank}" if member.request.role == contract.ROLE_WORKER else f"{word} {rank}"
        return f"{known if rank >= 0 else f'a {word}'} ({member.request.name}, {member.address})"


def describe_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0, 4-7"."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"{'rank' if words and words[0].isdecimal() and len(words) == 1 else 'ranks'} {', '.join(words)}"


def _order(address: str) -> tuple[int, int]:
    """Return what sorts numeric addresses by number: 10.0.0.9 before 10.0.0.10."""
    parsed = ipaddress.ip_address(address)
    return parsed.version, int(parsed)


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
