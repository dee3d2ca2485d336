"""Which ranks run on which host of a list: contiguous by host, or as a rank table says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msrun.errors import UsageError
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.ranks import fold_ranks
from ranktable.hostlist.host_name import host_key

UNKNOWN = "?"
"""An address that is found out when the host is reached."""


def assign_hosts(entries: Sequence[HostEntry], table: Sequence[HostAssignment] = ()) -> tuple[HostAssignment, ...]:
    """Return the assignment of each host; ranks and devices are the table's where there is one.

    Args:
        table: the assignments of a rank table, in the order of the hosts.
    """
    if table:
        return tuple(
            replace(assignment, name=entry.name, address=entry.address or assignment.address)
            for entry, assignment in zip(entries, table, strict=True)
        )
    assignments, first = [], 0
    for node_rank, entry in enumerate(entries):
        ranks = tuple(range(first, first + entry.slots))
        assignments.append(
            HostAssignment(node_rank, entry.name, entry.known_address or UNKNOWN, ranks, entry.device_ids)
        )
        first += entry.slots
    return tuple(assignments)


def order_by_table(
    entries: Sequence[HostEntry], table: Sequence[HostAssignment], names: Sequence[Sequence[str]], source: str
) -> tuple[HostEntry, ...]:
    """Return the hosts of a list in the order of a rank table, with its workers and devices.

    Args:
        names: what the table calls each of its hosts: its addresses and its id.
        source: the table, for errors.

    Raises:
        UsageError: the two do not name the same hosts, or give one of them different workers.
    """
    left = list(entries)
    found = []
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
    """Return a host with the workers and devices that a rank table gives it.

    Raises:
        UsageError: the list gives it others.
    """
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
