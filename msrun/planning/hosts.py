"""The hosts of a job that one command starts on many, and which ranks run on which: entries of a list, slots, the
assignment of each host, hosts in the place of lost ones, hosts of a rehearsal; and ranks as text. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from msrun.errors import UsageError
from msrun.planning.record import Record
from ranktable.errors import HostListError
from ranktable.hosts.brackets import fold, shorten
from ranktable.hosts.host_list import ListedHost
from ranktable.hosts.names import MAX_SLOTS, host_key
from ranktable.hosts.ranges import fold_numbers, runs_of


def fold_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text with runs folded: [0, 1, 2, 5] -> "0-2, 5"."""
    return fold_numbers(ranks)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as the subject of a sentence: "rank 2", "ranks 0-2, 5"."""
    folded = fold_ranks(ranks)
    return f"rank {folded}" if folded.isdigit() else f"ranks {folded}"


def count_workers(number: int) -> str:
    """Return a number of workers: "1 worker", "2 workers", "0 workers"."""
    return "1 worker" if number == 1 else f"{number} workers"


class HostAssignment(Record):
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


class Fleet(Record):
    """All hosts of a job, as one of them sees it."""

    node_rank: int
    hosts: tuple[HostAssignment, ...]  # in the order of their node_rank
    master_addr: str  # numeric address of the scheduler and its store
    interface: str  # name of this host's network interface towards the master; empty when it is not known
    is_assumed: bool = False  # the others are taken to be like this one: a dry run without a rank table

    @property
    def own(self) -> HostAssignment:
        return next(assignment for assignment in self.hosts if assignment.node_rank == self.node_rank)


@contextmanager
def blamed_on(source: str = "") -> Iterator[None]:
    """Turn an error of a host list into a UsageError; it names `source` where it does not name its own."""
    try:
        with HostListError.at(source):
            yield
    except HostListError as error:
        raise UsageError(str(error)) from None


class HostEntry(ListedHost):
    """One host of a job."""

    has_come: bool = False  # msrun was started there, and has come to the scheduler's host; nothing is to be reached
    is_rehearsed: bool = False  # an agent on this machine stands for it, at an address of loopback


def give_slots(
    entries: Sequence[HostEntry], *, worker_num: int | None, local_worker_num: int | None
) -> tuple[HostEntry, ...]:
    """Return the hosts with their number of workers: of the list, else `local_worker_num`, else an even share of what
    `worker_num` leaves, else 1, as with torchrun and mpirun (UsageError: a contradiction, or no even share)."""
    silent, share = [entry for entry in entries if not entry.slots], 1
    if local_worker_num is not None:
        share = local_worker_num
        if not 1 <= share <= MAX_SLOTS:
            raise UsageError(f"--local_worker_num {share}: must be 1 to {MAX_SLOTS} with several hosts")
        other = next((entry for entry in entries if entry.slots != share), None)
        if not silent and other is not None:
            raise UsageError(
                f"--local_worker_num {share}: {other.source} gives {other.name} {other.slots} slots; leave "
                "--local_worker_num out, it is for hosts without slots"
            )
    elif worker_num is not None and silent:
        left = worker_num - sum(entry.slots for entry in entries)
        share, rest = divmod(left, len(silent))
        if rest or not 1 <= share <= MAX_SLOTS:
            raise UsageError(
                f"--worker_num {worker_num}: leaves {count_workers(left)} for {_hosts(silent)} without slots "
                f"({shorten(fold(entry.name for entry in silent))}), which cannot be shared evenly; give slots, e.g. "
                f"{silent[0].name}:8"
            )
    found = tuple(
        entry if entry.slots else replace(entry, slots=share, device_ids=tuple(range(share))) for entry in entries
    )
    full = next((entry for entry in found if 0 < entry.max_slots < entry.slots), None)
    if full is not None:
        raise UsageError(
            f"{full.source}: {full.name} takes {full.max_slots} workers at most (max_slots), not {full.slots}; give it "
            "slots, or start fewer workers"
        )
    total = sum(entry.slots for entry in found)
    if worker_num is not None and worker_num != total:
        raise UsageError(
            f"--worker_num {worker_num}: the slots of {_hosts(found)} add up to {total}; make them equal, or leave "
            "--worker_num out"
        )
    return found


def _hosts(entries: Sequence[HostEntry]) -> str:
    return f"{len(entries)} hosts" if len(entries) > 1 else entries[0].name


UNKNOWN = "?"  # an address that is found out when the host is reached


def assign_hosts(entries: Sequence[HostEntry], table: Sequence[HostAssignment] = ()) -> tuple[HostAssignment, ...]:
    """Return the assignment of each host; ranks and devices are those of a rank table, in its order, where one is."""
    if table:
        return tuple(
            replace(assignment, name=entry.name, address=entry.address or assignment.address)
            for entry, assignment in zip(entries, table, strict=True)
        )
    assignments, first = [], 0
    for node_rank, entry in enumerate(entries):
        address, ranks = entry.known_address or UNKNOWN, tuple(range(first, first + entry.slots))
        assignments.append(HostAssignment(node_rank, entry.name, address, ranks, entry.device_ids))
        first += entry.slots
    return tuple(assignments)


def order_by_table(
    entries: Sequence[HostEntry], table: Sequence[HostAssignment], names: Sequence[Sequence[str]], source: str
) -> tuple[HostEntry, ...]:
    """Return the hosts of a list in the order of the rank table `source`, which calls them by `names` (UsageError)."""
    left, found = list(entries), []
    for assignment, words in zip(table, names, strict=True):
        keys = {host_key(word) for word in words}
        entry = next((entry for entry in left if entry.keys & keys), None)
        if entry is None:
            raise UsageError(
                f"{source}: its server {assignment.name} is no host of {entries[0].source}; name the same hosts in "
                f"both, or add address={assignment.address} to its line of the hostfile"
            )
        left.remove(entry)
        found.append(as_in_table(entry, assignment, source))
    if left:
        raise UsageError(
            f"{left[0].source}: {left[0].name} is no server of {source}; name the same hosts in both, or give its line "
            "of the hostfile the address= that the table has"
        )
    return tuple(found)


def as_in_table(entry: HostEntry, assignment: HostAssignment, source: str) -> HostEntry:
    """Return a host with the workers and devices that a rank table gives it (UsageError: the list gives it others)."""
    if entry.slots and entry.slots != len(assignment.ranks):
        raise UsageError(
            f"{entry.source}: {entry.name} has {entry.slots} slots, in {source} it has {len(assignment.ranks)}; make "
            "them equal, or leave the slots out"
        )
    is_numbered = entry.device_ids != tuple(range(entry.slots))
    if is_numbered and sorted(entry.device_ids) != sorted(assignment.device_ids):
        raise UsageError(
            f"{entry.source}: {entry.name} has devices {fold_ranks(entry.device_ids)}, but "
            f"{fold_ranks(assignment.device_ids)} in {source}; make them equal, or leave devices= out"
        )
    return replace(entry, slots=len(assignment.ranks), device_ids=assignment.device_ids)


MAX_FAILURES = 2  # a host that fails so often is left out


class HostPool:
    """The hosts of one job, from its first start to its last."""

    def __init__(
        self,
        entries: Sequence[HostEntry],
        spares: Sequence[HostEntry],
        min_hosts: int,
        max_workers: int = 0,
        needed: HostEntry | None = None,
    ) -> None:
        """`entries`: the hosts that the job starts on; `min_hosts`: how few may run it, 0 = all; `max_workers`: as many
        hosts are chosen as run so many, 0 = as many as it starts on; `needed`: the one without which it cannot run."""
        self._needed = needed
        self.chosen = tuple(entries)  # the hosts of the next start, in the order of their node_rank
        self._all = (*entries, *spares)
        self._size, self._max_workers = len(entries), max_workers
        self.min_hosts = min_hosts
        self._failures: Counter[HostEntry] = Counter()
        self.gone: set[HostEntry] = set()  # those that have left of their own accord

    @property
    def waiting(self) -> tuple[HostEntry, ...]:
        return tuple(entry for entry in self._all if entry not in (*self.chosen, *self.left_out))

    @property
    def left_out(self) -> tuple[HostEntry, ...]:
        return tuple(entry for entry in self._all if not self._may_run(entry))

    def _may_run(self, entry: HostEntry) -> bool:
        return entry not in self.gone and self._failures[entry] < (1 if entry.has_come else MAX_FAILURES)

    def lose(self, lost: Collection[HostEntry], gone: Collection[HostEntry] = ()) -> bool:
        """Choose hosts for another start, after some have failed or, `gone`, have left; False when there are too few.
        Those that run well stay, in order; then come spare ones, then those that have failed once before; one that has
        failed now only where the others are not enough."""
        self._failures.update(lost)
        self.gone.update(gone)
        chosen = self._choose(lost, lost)
        if len(chosen) < self.min_hosts:
            chosen = self._choose(lost)
        if not self.min_hosts or len(chosen) < self.min_hosts or (self._needed and self._needed not in chosen):
            return False
        self.chosen = chosen
        return True

    def add(self, entry: HostEntry) -> None:
        self._failures.pop(entry, None)
        self.gone.discard(entry)
        self.remove(entry)
        self._all = (*self._all, entry)

    def remove(self, entry: HostEntry) -> None:
        self._all = tuple(other for other in self._all if other != entry)

    @property
    def can_grow(self) -> bool:
        return bool(self._max_workers) and self._choose(()) != self.chosen

    def grow(self) -> bool:
        """Choose more hosts for the next start, of those that have come; False when there are none."""
        is_more = self.can_grow
        if is_more:
            self.chosen = self._choose(())
        return is_more

    def _choose(self, lost: Collection[HostEntry], without: Collection[HostEntry] = ()) -> tuple[HostEntry, ...]:
        staying = [entry for entry in self.chosen if entry not in lost and self._may_run(entry)]
        others = [entry for entry in self._all if entry not in (*staying, *without) and self._may_run(entry)]
        chosen: list[HostEntry] = []
        for entry in (*staying, *sorted(others, key=self._failures.__getitem__)):
            count = sum(one.slots for one in chosen) + entry.slots
            if count <= self._max_workers if self._max_workers else len(chosen) < self._size:
                chosen.append(entry)
        return tuple(chosen)


FIRST_ADDRESS = "127.0.0.2"  # 127.0.0.1 stays the address of jobs on one host
MAX_HOSTS = 250
_FORM = r"([1-9][0-9]*)(?:x([1-9][0-9]*))?\Z"


def parse_rehearsal(text: str) -> tuple[HostEntry, ...]:
    """Turn `4x2` into four hosts of two workers, host0 at 127.0.0.2 and so on; `4`: of 0 slots (UsageError)."""
    import ipaddress  # not for --help

    match = re.match(_FORM, text)
    if not match:
        raise UsageError(f"--rehearse {shorten(text)}: give HOSTSxWORKERS, such as 4x2 for four hosts of two workers")
    hosts, slots = (int((number or "0")[:9]) for number in match.groups())
    if hosts > MAX_HOSTS or slots > MAX_SLOTS:
        raise UsageError(
            f"--rehearse {shorten(text)}: {MAX_HOSTS} hosts of {MAX_SLOTS} workers are the most; give fewer"
        )
    devices, source = tuple(range(slots)), f"--rehearse {text}"
    addresses = [str(ipaddress.IPv4Address(FIRST_ADDRESS) + index) for index in range(hosts)]
    return tuple(
        HostEntry(f"host{index}", slots, devices, address=address, source=source, is_rehearsed=True)
        for index, address in enumerate(addresses)
    )


def stand_in(entries: Sequence[HostEntry], table: Sequence[HostAssignment], source: str) -> tuple[HostEntry, ...]:
    """Return the rehearsed hosts with workers and devices of the servers of a rank table, the `source` (UsageError)."""
    if len(entries) != len(table):
        raise UsageError(
            f"{entries[0].source}: {len(entries)} hosts, but {source} has {len(table)} servers; make them equal"
        )
    return tuple(as_in_table(entry, assignment, source) for entry, assignment in zip(entries, table, strict=True))
