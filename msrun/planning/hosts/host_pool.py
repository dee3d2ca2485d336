"""Which hosts run a job that may lose some: those of the list, spare ones in their place, and what is left of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from msrun.planning.hosts.host_entry import HostEntry

MAX_FAILURES = 2
"""A host that fails so often is left out."""


class HostPool:
    """The hosts of one job, from its first start to its last."""

    def __init__(self, entries: Sequence[HostEntry], spares: Sequence[HostEntry], min_hosts: int) -> None:
        """
        Args:
            entries: the hosts that the job starts on.
            min_hosts: how few of them may run it.
        """
        self.chosen = tuple(entries)
        """The hosts of the next start, in the order of their node_rank."""
        self._all = (*entries, *spares)
        self._size = len(entries)
        self._min_hosts = min_hosts
        self._failures: Counter[HostEntry] = Counter()

    @property
    def waiting(self) -> tuple[HostEntry, ...]:
        """The hosts that are not chosen and may be yet."""
        return tuple(entry for entry in self._all if entry not in (*self.chosen, *self.left_out))

    @property
    def left_out(self) -> tuple[HostEntry, ...]:
        """The hosts that are tried no more."""
        return tuple(entry for entry in self._all if self._failures[entry] >= MAX_FAILURES)

    def lose(self, lost: Collection[HostEntry]) -> bool:
        """Choose hosts for another start, after some have failed; False when there are too few.

        Hosts that run well stay, in their order. Behind them come spare ones, then those that have failed once, which
        may be back.
        """
        self._failures.update(lost)
        staying = [entry for entry in self.chosen if entry not in lost]
        others = [entry for entry in self._all if entry not in staying and self._failures[entry] < MAX_FAILURES]
        others.sort(key=lambda entry: self._failures[entry])
        chosen = (*staying, *others)[: self._size]
        if len(chosen) < self._min_hosts:
            return False
        self.chosen = chosen
        return True
