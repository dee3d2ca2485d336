"""Who is where in a job of several hosts: the assignment of each host, once everybody has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ranktable.hosts.ranges import runs_of


@dataclass(frozen=True)
class HostAssignment:
    """One host of a job: its index, where it is, and the ranks that run there."""

    node_rank: int
    name: str
    address: str  # towards the master
    ranks: tuple[int, ...]  # global ranks in the order of their local ones
    device_ids: tuple[int, ...]

    def describe(self) -> str:
        return f"node {self.node_rank} ({self.name}, {self.address})"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict; ranks and devices are short however many they are: runs [first, count]."""
        runs = {
            name: [[first, last - first + 1] for first, last in runs_of(getattr(self, name))]
            for name in ("ranks", "device_ids")
        }
        return {"node_rank": self.node_rank, "name": self.name, "address": self.address, **runs}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HostAssignment:
        ranks, devices = (
            tuple(number for first, count in value[name] for number in range(first, first + count))
            for name in ("ranks", "device_ids")
        )
        return cls(value["node_rank"], value["name"], value["address"], ranks, devices)


@dataclass(frozen=True)
class Fleet:
    """All hosts of a job, as one of them sees it."""

    node_rank: int
    hosts: tuple[HostAssignment, ...]  # in the order of their node_rank
    master_addr: str  # numeric address of the scheduler and its store
    interface: str  # name of this host's network interface towards the master; empty when it is not known
    is_assumed: bool = False
    """Only this host is known; the others are taken to be like it. A dry run without a rank table."""

    @property
    def own(self) -> HostAssignment:
        return next(assignment for assignment in self.hosts if assignment.node_rank == self.node_rank)
