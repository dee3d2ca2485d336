"""Ranks of the hosts of a list: contiguous by host, or those of a rank table."""

from __future__ import annotations

import pytest

from msrun.errors import UsageError
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.hosts.assignment import assign_hosts, order_by_table
from msrun.planning.hosts.host_entry import HostEntry
from ranktable.hosts.hostfile import parse_hostfile

TABLE = (
    HostAssignment(0, "node-b", "10.0.0.2", (0, 1), (4, 5)),
    HostAssignment(1, "node-a", "10.0.0.1", (2, 4, 3), (0, 2, 1)),
)
NAMES = (("10.0.0.2", "node-b"), ("10.0.0.1", "node-a"))


def test_ranks_are_contiguous_by_host_however_unequal_the_hosts_are() -> None:
    entries = parse_hostfile("h1 slots=3\n10.0.0.7 slots=1\nh3 devices=2,6 address=10.0.0.9", HostEntry, "--hostfile f")
    assert assign_hosts(entries) == (
        HostAssignment(0, "h1", "?", (0, 1, 2), (0, 1, 2)),
        HostAssignment(1, "10.0.0.7", "10.0.0.7", (3,), (0,)),
        HostAssignment(2, "h3", "10.0.0.9", (4, 5), (2, 6)),
    )


def test_twenty_times_the_same_hosts_give_twenty_times_the_same_assignments() -> None:
    assert len({assign_hosts(parse_hostfile("h2:2\nh1:2", HostEntry, "--hostfile f")) for _ in range(20)}) == 1


@pytest.mark.parametrize(
    "text",
    [
        "node-a\nnode-b",
        "10.0.0.1\nNode-B",
        "a address=10.0.0.1\nb address=10.0.0.2",
        "node-a:3\nnode-b devices=5,4",
        "node-a:3\nnode-b slots=2",
    ],
)
def test_table_gives_order_ranks_and_devices(text: str) -> None:
    entries = parse_hostfile(text, HostEntry, "--hostfile f")
    ordered = order_by_table(entries, TABLE, NAMES, "t.json")
    assert [entry.name for entry in ordered] == [entry.name for entry in reversed(entries)]
    assert [(entry.slots, entry.device_ids) for entry in ordered] == [(2, (4, 5)), (3, (0, 2, 1))]
    assignments = assign_hosts(ordered, TABLE)
    assert [assignment.ranks for assignment in assignments] == [(0, 1), (2, 4, 3)]
    assert [assignment.name for assignment in assignments] == [entry.name for entry in ordered]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node-a", "t.json: its server node-b is no host of --hostfile f, line 1; .* add address=10.0.0.2 to its line"),
        ("node-a\nnode-b\nh3", "--hostfile f, line 3: h3 is no server of t.json"),
        ("a\nb", "t.json: its server node-b is no host"),
        ("node-a slots=2\nnode-b", "line 1: node-a has 2 slots, in t.json it has 3"),
        ("node-a\nnode-b devices=4,6", "line 2: node-b has devices 4, 6, but 4-5 in t.json"),
    ],
)
def test_list_and_table_of_different_hosts_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        order_by_table(parse_hostfile(text, HostEntry, "--hostfile f"), TABLE, NAMES, "t.json")
