"""Who has come to a meeting, who is missing, and which rank each has; no sockets here."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

PROTOCOL = 1
SHOWN_HOSTS = 8
MAX_NAME = 1024
MAX_PROTOCOL = 1 << 16


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
        return cls(key, size, rank, name)


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
    """The members of one world, by number in the order of their coming."""

    def __init__(self, key: str, world_size: int) -> None:
        self.world_size = world_size
        self._key = key
        self._members: dict[int, _Member] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all have come."""
        return len(self._members) == self.world_size

    def admit(self, number: int, request: Request, address: str) -> None:
        """Take a member in.

        Args:
            number: of the member, higher than those before.
            address: its numeric address.

        Raises:
            Refused: it belongs to another job, or its place is taken.
        """
        size, rank = self.world_size, request.global_rank
        if request.world_size != size:
            raise Refused(f"it says that the world has {request.world_size} ranks, but here it has {size}")
        if request.key != self._key:
            raise Refused("it belongs to another job, which should have a port of its own")
        if not -1 <= rank < size:
            raise Refused(f"its rank is {rank}, but here ranks are 0 to {size - 1}")
        if self.is_complete:
            raise Refused(f"an extra worker: all {size} have come")
        taken = [member for member in self._members.values() if rank != -1 and member.request.global_rank == rank]
        if taken:
            raise Refused(f"rank {rank} is taken by {self._describe(taken[0])}")
        self._members[number] = _Member(request, address)

    def remove(self, number: int) -> str:
        """Forget a member, and return who it was."""
        return self._describe(self._members.pop(number))

    def describe(self, number: int) -> str:
        """Return who a member is: its rank, its name and its address."""
        return self._describe(self._members[number])

    def assign(self) -> dict[int, Seat]:
        """Return everybody's place; to be called when all have come.

        Who asked for a rank has it. The others get those that are left, by the numeric address of their host and there
        in the order of their coming, so that the ranks of a host stand together (MindSpore sorts hosts in that way).
        """
        ranks = {number: member.request.global_rank for number, member in self._members.items()}
        free = iter(sorted(set(range(self.world_size)) - set(ranks.values())))
        for number in sorted(self._members, key=lambda number: (_order(self._members[number].address), number)):
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
        asked = {member.request.global_rank for member in members}
        if -1 in asked or not members:
            count = self.world_size - len(members)
            missing = f"{count} more worker{'s' if count > 1 else ''}"
        else:
            missing = describe_ranks(set(range(self.world_size)) - asked)
        counts = Counter(member.address for member in members)
        came = [f"{address} with {counts[address]}" for address in sorted(counts, key=_order)]
        more = f" and {len(came) - SHOWN_HOSTS} more" if len(came) > SHOWN_HOSTS else ""
        told = f"; came: {', '.join(came[:SHOWN_HOSTS])}{more}" if came else ""
        return f"{len(members)} of {self.world_size} registered, missing: {missing}{told}"

    def _describe(self, member: _Member) -> str:
        rank = member.request.global_rank
        return f"{f'rank {rank}' if rank >= 0 else 'a worker'} ({member.request.name}, {member.address})"


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
