"""What a host decides of several before it talks to any: who has the scheduler, where logs go, what a dry run shows."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from msrun.cluster import rendezvous
from msrun.cluster.rendezvous import UnresolvedName, own_addresses, resolve_address
from msrun.errors import UsageError
from msrun.launch import rendezvous as module
from msrun.launch.preflight.checks import inspect_host
from msrun.launch.rendezvous import UNKNOWN, assume_fleet, has_scheduler, local_part
from msrun.planning.host_assignment import Fleet, HostAssignment
from msrun.planning.placement.host import HostFacts
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

FACTS = HostFacts("here", "127.0.0.1", (0, 1))


def spec_for(**changes: Any) -> LaunchSpec:
    settings: dict[str, Any] = {
        "program": Program("script", "/t.py", ()),
        "worker_num": 4,
        "local_worker_num": 2,
        "working_directory": Path("/"),
        "log_dir": Path("/logs"),
        "master_addr": "10.0.0.7",
    }
    return LaunchSpec(**{**settings, **changes})


@pytest.fixture(autouse=True)
def this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "own_addresses", lambda: {"127.0.0.1": "lo", "10.0.0.7": "eth0"})


@pytest.mark.parametrize(
    ("node_rank", "address", "has"),
    [(0, "10.0.0.7", True), (1, "10.0.0.7", False), (-1, "10.0.0.7", True), (-1, "10.0.0.8", False)],
)
def test_scheduler_is_on_node_0_or_where_the_address_is(node_rank: int, address: str, has: bool) -> None:
    assert has_scheduler(spec_for(node_rank=node_rank), address) is has


def test_node_0_without_the_address_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--master_addr 10.0.0.7: not an address of this host.* 10.0.0.7, 127.0.0.1"):
        has_scheduler(spec_for(node_rank=0), "10.0.0.8")


def test_hosts_that_share_a_disk_write_different_files() -> None:
    assignments = tuple(HostAssignment(node, "h", f"10.0.0.{node}", (node,), (0,)) for node in range(2))
    folders = [local_part(spec_for(), Fleet(node, assignments, "10.0.0.0", "eth0")).log_dir for node in range(2)]
    assert folders == [Path("/logs"), Path("/logs/node_1")]


@pytest.mark.parametrize(
    ("changes", "node_rank", "ranks"),
    [
        ({}, 0, [(0, 1), (2, 3)]),
        ({"node_rank": 1}, 1, [(0, 1), (2, 3)]),
        ({"master_addr": "10.0.0.8"}, 1, [(0, 1), (2, 3)]),
        ({"worker_num": 5}, 0, [(0, 1), (2, 3), (4,)]),
        ({"worker_num": 3, "node_rank": 1}, 1, [(0,), (1, 2)]),
        ({"worker_num": 5, "node_rank": 2}, 2, [(0, 1), (2,), (3, 4)]),
    ],
)
def test_dry_run_without_a_table_assumes_equal_hosts(
    changes: dict[str, Any], node_rank: int, ranks: list[tuple[int, ...]]
) -> None:
    fleet = assume_fleet(spec_for(**changes), FACTS)
    assert fleet.is_assumed and fleet.node_rank == node_rank
    assert [assignment.ranks for assignment in fleet.hosts] == ranks
    assert (fleet.own.name, fleet.own.address, fleet.interface) == ("here", "10.0.0.7", "eth0")
    assert {assignment.name for assignment in fleet.hosts if assignment.node_rank != node_rank} == {UNKNOWN}


def test_dry_run_with_a_table_shows_its_hosts() -> None:
    table = (HostAssignment(0, "a", "10.0.0.8", (0, 1), (0, 1)), HostAssignment(1, "b", "10.0.0.7", (2, 3), (4, 5)))
    fleet = assume_fleet(spec_for(node_rank=1, table_hosts=table), FACTS)
    assert not fleet.is_assumed and fleet.own is table[1]


def test_name_that_stands_for_loopback_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian and its kin write their own name into /etc/hosts as 127.0.1.1."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 0))])
    with pytest.raises(UsageError, match=r"--master_addr debian: is 127.0.1.1 .* which no other can reach"):
        resolve_address("debian")
    assert resolve_address("localhost") == "127.0.1.1"  # asked for: all msruns are on this machine


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-such-host.invalid", "Name or service not known"),
        ("a" * 300, "not a host name"),
        ("..", "not a host name"),
    ],
)
def test_name_that_nobody_knows_is_refused(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise rendezvous.socket.gaierror(-2, "Name or service not known")

    if name.endswith("invalid"):  # no name server is asked
        monkeypatch.setattr(rendezvous.socket, "getaddrinfo", fail)
    with pytest.raises(UnresolvedName, match=rf"cannot be resolved \({reason}\)"):
        resolve_address(name)


def test_check_warns_of_a_name_that_nobody_knows_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str) -> str:
        raise UnresolvedName(f"{name}: not known")

    monkeypatch.setattr(rendezvous, "resolve_address", resolve)
    (port,) = [finding for finding in inspect_host(spec_for(), {}) if finding.name == "master_port"]
    assert (port.status, port.text) == ("warn", "10.0.0.7: not known; a run waits for it as long as for a host")


def test_own_addresses_hold_loopback_with_its_interface() -> None:
    assert own_addresses()["127.0.0.1"] == "lo"
