"""What most hosts have in common, and which ones are odd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrun.launch.preflight.fleet_finding import name_hosts
from msrun.planning.hosts.host_entry import HostEntry

SHOWN_GROUPS = 3


@dataclass(frozen=True)
class Majority:
    """Hosts by what they have."""

    usual: str
    """What most have; of two groups of one size, what the earlier host has."""
    groups: Mapping[str, tuple[int, ...]]
    """Value -> node ranks, in the order of each value's first host."""

    @property
    def odd(self) -> Mapping[str, tuple[int, ...]]:
        """Those who have something else."""
        return {value: nodes for value, nodes in self.groups.items() if value != self.usual}

    def name_usual(self, entries: Sequence[HostEntry]) -> str:
        """Return the others in words: "the other 15 hosts", or the only one by its name."""
        nodes = self.groups[self.usual]
        return f"the other {len(nodes)} hosts" if len(nodes) > 1 else name_hosts(nodes, entries)

    def describe(self, entries: Sequence[HostEntry], *, has: str = "has", have: str = "have") -> str:
        """Return who is odd and how: "h3 has 2.12.0, the other 15 hosts 2.13.0"."""
        odd = list(self.odd.items())
        words = [
            f"{name_hosts(nodes, entries)} {has if len(nodes) == 1 else have} {value}"
            for value, nodes in odd[:SHOWN_GROUPS]
        ]
        if left := sum(len(nodes) for _, nodes in odd[SHOWN_GROUPS:]):
            words.append(f"{left} more {have} others")
        return ", ".join([*words, f"{self.name_usual(entries)} {self.usual}"])


def find_majority(values: Mapping[int, str]) -> Majority:
    """Group hosts, given by node rank, by a value of each."""
    groups: dict[str, tuple[int, ...]] = {}
    for node, value in sorted(values.items()):
        groups[value] = (*groups.get(value, ()), node)
    return Majority(max(groups, key=lambda value: len(groups[value]), default=""), groups)
