"""The hosts of --rehearse: agents on this machine, each at a loopback address of its own. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from msrun.errors import UsageError
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.hosts.assignment import as_in_table
from msrun.planning.hosts.host_entry import HostEntry
from ranktable.hostlist.brackets import shorten
from ranktable.hostlist.host_name import MAX_SLOTS

FIRST_ADDRESS = ipaddress.IPv4Address("127.0.0.2")
"""127.0.0.1 stays the address of jobs on one host."""
MAX_HOSTS = 250
_FORM = re.compile(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?\Z")


def parse_rehearsal(text: str) -> tuple[HostEntry, ...]:
    """Turn `4x2` into four hosts of two workers: host0 at 127.0.0.2, host1 at 127.0.0.3, and so on.

    `4` says nothing of the workers: 0 slots.

    Raises:
        UsageError: it is not of this form, or a number is too large.
    """
    match = _FORM.match(text)
    if not match:
        raise UsageError(f"--rehearse {shorten(text)}: give HOSTSxWORKERS, such as 4x2 for four hosts of two workers")
    hosts, slots = (int((number or "0")[:9]) for number in match.groups())
    if hosts > MAX_HOSTS or slots > MAX_SLOTS:
        raise UsageError(
            f"--rehearse {shorten(text)}: {MAX_HOSTS} hosts of {MAX_SLOTS} workers are the most; give fewer"
        )
    return tuple(
        HostEntry(
            f"host{index}",
            slots,
            tuple(range(slots)),
            address=str(FIRST_ADDRESS + index),
            source=f"--rehearse {text}",
            is_rehearsed=True,
        )
        for index in range(hosts)
    )


def stand_in(entries: Sequence[HostEntry], table: Sequence[HostAssignment], source: str) -> tuple[HostEntry, ...]:
    """Return the rehearsed hosts with the workers and devices of a rank table, whose servers they stand for in order.

    Args:
        source: the table, for errors.

    Raises:
        UsageError: it has another number of servers, or of workers on one.
    """
    if len(entries) != len(table):
        raise UsageError(
            f"{entries[0].source}: {len(entries)} hosts, but {source} has {len(table)} servers; make them equal"
        )
    return tuple(as_in_table(entry, assignment, source) for entry, assignment in zip(entries, table, strict=True))
