"""Who has come to a job of several hosts, who is refused, and who gets which ranks. Pure: no socket, no clock."""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from msrun.cluster.protocol import protocol
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.ranks import count_workers, fold_ranks, name_ranks
from msrun.planning.spec import is_loopback

MAX_NAME = 255
MAX_WORKERS = 1 << 24  # more than any job has; a number beyond it is a mistake or a trick
SHOWN_HOSTS = 8
Count = Annotated[int, msgspec.Meta(ge=-1, le=MAX_WORKERS)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class Refused(Exception):
    """A host cannot take part. The message is for the refused host and for the record."""


class NoKey(Refused):
    """This host does not know the key by which those of the job know each other, or not yet."""


WRONG_KEY = "wrong token: give all hosts the same --token_file or MSRUN_TOKEN, or a --log_dir that they share"


def other_protocol(spoken: object) -> str:
    text = spoken if isinstance(spoken, int) else "?"
    return f"its msrun speaks protocol {text}, this one {protocol()}: install the same version on all hosts"


@dataclass(frozen=True)
class HostRequest:
    """What a host says of itself when it registers."""

    protocol: int
    worker_num: Count
    local_worker_num: Count
    node_rank: Count  # -1 = by address
    name: Name
    address: Name  # numeric, towards the master
    max_restarts: Count
    table: Name = ""  # digest of the rank table that the host was given; empty without one

    @classmethod
    def from_json(cls, value: object) -> HostRequest:
        """Return the request in a message. Raises Refused: it is none."""
        if not isinstance(value, Mapping):
            raise Refused("it does not say who it is")
        if value.get("protocol") != protocol():
            raise Refused(other_protocol(value.get("protocol")))
        try:
            request = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise Refused(f"its request is none: {error}") from None
        if not (request.name + request.address + request.table).isprintable():
            raise Refused("its name or address is none")
        if request.local_worker_num < 1:
            raise Refused(f"--local_worker_num {request.local_worker_num}: must be 1 or more")
        try:
            ipaddress.ip_address(request.address)
        except ValueError:
            raise Refused(f"{request.address!r} is no address") from None
        return request

    def describe(self) -> str:
        node = f"node {self.node_rank} " if self.node_rank >= 0 else ""
        return f"{node}({self.name}, {self.address})"


class Registry:
    """The hosts that have come so far. Keys are the caller's: a connection, for example."""

    def __init__(
        self, worker_num: int, max_restarts: int, expected: Sequence[HostAssignment] = (), table: str = ""
    ) -> None:
        """`expected`: the hosts of a rank table; then nobody else may come. `table`: its digest."""
        self._asked_num = self._worker_num = worker_num
        self._max_restarts = max_restarts
        self._expected = {assignment.node_rank: assignment for assignment in expected}
        self._table = table
        self._requests: dict[Hashable, HostRequest] = {}
        self._by_node: dict[int, HostRequest] = {}
        self.registered = 0  # how many workers the hosts that came will run

    def add(self, key: Hashable, request: HostRequest) -> None:
        """Let a host in. Raises Refused: it does not fit this job."""
        self._check_settings(request)
        if self.is_complete:
            raise Refused(
                f"an extra host: the job is complete with {self._worker_num} workers on {len(self._requests)} hosts"
            )
        self._check_beside(request)
        node, count, missing = request.node_rank, request.local_worker_num, self._worker_num - self.registered
        assignment = self._expected.get(node)
        if self._expected and (assignment is None or len(assignment.ranks) != count):
            raise Refused(f"--node_rank {node} with {count_workers(count)}: not in the table")
        if count > missing:
            raise Refused(
                f"--local_worker_num {count}: only {missing} of {self._worker_num} workers are missing; the numbers of "
                "all hosts must add up to --worker_num"
            )
        nodes = sorted([node, *(other.node_rank for other in self._requests.values())])
        if node >= 0 and count == missing and nodes != list(range(len(nodes))):
            raise Refused(
                f"--node_rank {node}: with it all {self._worker_num} workers are there, but the hosts are "
                f"{fold_ranks(nodes)}; {len(nodes)} hosts have the node_ranks 0 to {len(nodes) - 1}"
            )
        self._requests[key] = self._by_node[node] = request
        self.registered += count

    def check_late(self, request: HostRequest) -> None:
        """Look at a host that comes while the job runs on others. Raises Refused: it does not fit this job."""
        self._check_settings(request)
        if request.local_worker_num > self._asked_num:
            raise Refused(f"--local_worker_num {request.local_worker_num}: the job has {self._asked_num} workers")

    def remove(self, key: Hashable) -> HostRequest | None:
        """Forget a host that has gone before everybody had come; it may come again."""
        request = self._requests.pop(key, None)
        if request is not None:
            self._by_node.pop(request.node_rank, None)
            self.registered -= request.local_worker_num
        return request

    def _check_settings(self, request: HostRequest) -> None:
        for name, given, here in (
            ("worker_num", request.worker_num, self._asked_num),
            ("max_restarts", request.max_restarts, self._max_restarts),
        ):
            if given != here:
                raise Refused(f"--{name} {given}, but {here} at the scheduler: give all hosts the same")
        if request.table != self._table:
            what = "another" if request.table and self._table else "a" if request.table else "no"
            raise Refused(f"{what} --rank_table_file than the scheduler: give all hosts the same table, or none")

    def _check_beside(self, request: HostRequest) -> None:
        first = next(iter(self._requests.values()), request)
        if (request.node_rank < 0) != (first.node_rank < 0):
            has, has_not = (first, request) if request.node_rank < 0 else (request, first)
            raise Refused(
                f"{has_not.describe()} gave no --node_rank, {has.describe()} did: give it on all hosts or on none"
            )
        if request.node_rank >= 0 and request.node_rank in self._by_node:
            other = self._by_node[request.node_rank]
            raise Refused(f"--node_rank {request.node_rank} is taken by {other.describe()}: give each host its own")
        same = (other for other in self._requests.values() if other.address == request.address)
        if (beside := next(same, None)) is not None and request.node_rank < 0 and not is_loopback(request.address):
            raise Refused(
                f"address {request.address} is taken by {beside.describe()}: one msrun starts all workers of a host"
            )

    def can_do_with(self, min_hosts: int) -> bool:
        """Whether so many hosts have come, with the node ranks 0 to n - 1 where they have any."""
        nodes = sorted(request.node_rank for request in self._requests.values())
        return len(nodes) >= min_hosts and (nodes[0] < 0 or nodes == list(range(len(nodes))))

    def close(self) -> None:
        """Let no more hosts in: those that have come are the job's."""
        self._worker_num = self.registered

    @property
    def is_complete(self) -> bool:
        return self.registered == self._worker_num

    def assignments(self) -> dict[Hashable, HostAssignment]:
        """Return the assignment of every host, once all have come: by node_rank, or by numeric address without it.
        Source: MindSpore numbers nodes without a given rank by their address as a number."""
        order = sorted(self._requests.items(), key=lambda item: _place(item[1]))
        found: dict[Hashable, HostAssignment] = {}
        first = 0
        for index, (key, request) in enumerate(order):
            assignment = self._expected.get(index)
            count = request.local_worker_num
            ranks = assignment.ranks if assignment else tuple(range(first, first + count))
            devices = assignment.device_ids if assignment else tuple(range(count))
            found[key] = HostAssignment(index, request.name, request.address, ranks, devices)
            first += count
        return found

    def describe(self) -> str:
        """Return who has come and who is missing: "8 of 16 registered, missing: node 1 (10.0.0.7) ranks 8-15"."""
        return f"{self.registered} of {self._worker_num} registered, missing: {self._missing()}"

    def describe_present(self) -> str:
        requests = sorted(self._requests.values(), key=_place)
        words = [f"{request.describe()} with {request.local_worker_num}" for request in requests[:SHOWN_HOSTS]]
        return _shortened(words, len(requests))

    def _missing(self) -> str:
        nodes = {request.node_rank for request in self._requests.values()}
        if self._expected:
            absent = [assignment for node, assignment in sorted(self._expected.items()) if node not in nodes]
            words = [f"node {s.node_rank} ({s.address}) {name_ranks(s.ranks)}" for s in absent[:SHOWN_HOSTS]]
            return _shortened(words, len(absent))
        left = self._worker_num - self.registered
        if nodes and -1 not in nodes:
            gaps = sorted(set(range(max(nodes))) - nodes)
            if not gaps:
                return f"{name_ranks(range(self.registered, self._worker_num))}, from node {max(nodes) + 1} on"
            return f"{count_workers(left)}, among them those of node {fold_ranks(gaps)}"
        return count_workers(left)


def _place(request: HostRequest) -> tuple[int, int, int]:
    address = ipaddress.ip_address(request.address)
    return request.node_rank, address.version, int(address)


def _shortened(words: list[str], count: int) -> str:
    return ", ".join([*words, *([f"{count - len(words)} more hosts"] if count > len(words) else [])])
