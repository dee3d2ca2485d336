"""Who has come to a meeting, who is missing, and which rank each has; no sockets here."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from msrun import contract

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
