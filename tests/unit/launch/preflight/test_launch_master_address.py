"""Where the scheduler listens: at the given address if node 0 has it, else where node 0 is known to be reached."""

from __future__ import annotations

from typing import Any

import pytest
from fleet_reports import make_entries, make_report

from msrun.cluster.protocol import HostAddress
from msrun.errors import UsageError
from msrun.launch.preflight.fleet_checks import choose_master_address
from msrun.launch.preflight.host_report import HostAnswer

ETH = HostAddress("10.0.0.1", "eth0", 24)
MANAGEMENT = HostAddress("192.168.7.1", "eth1", 24)
DOCKER = HostAddress("172.17.0.1", "docker0", 16)
IPV6 = HostAddress("fd77::1", "eth0", 64)
ALL = (DOCKER, MANAGEMENT, ETH, IPV6)


def answers(reached_as: str = "", first: dict[str, Any] | None = None, others: dict[str, Any] | None = None) -> Any:
    """Return the answers of three hosts, the first of which has the addresses ALL."""
    found = {0: HostAnswer(make_report(0, **{"addresses": ALL, **(first or {})}), 0.0, 0.0, reached_as)}
    for node in (1, 2):
        found[node] = HostAnswer(make_report(node, **(others or {})), 0.0, 0.0, f"10.0.0.{node + 1}")
    return found


CHOICES: list[tuple[str, dict[str, Any], str]] = [
    ("as it was reached", {"reached_as": "10.0.0.1"}, "10.0.0.1"),
    ("as it was reached over IPv6", {"reached_as": "fd77::1"}, "fd77::1"),
    ("reached by another address than its own", {"reached_as": "203.0.113.5"}, "10.0.0.1"),
    ("reached over loopback", {"reached_as": "127.0.0.1"}, "10.0.0.1"),
    ("as others see their launcher", {"others": {"ssh_client": "192.168.7.1"}}, "192.168.7.1"),
    ("as sshd saw it", {"first": {"ssh_server": "192.168.7.1"}}, "192.168.7.1"),
    ("sshd behind a forwarded port", {"first": {"ssh_server": "127.0.0.1"}}, "10.0.0.1"),
    ("in a network of all", {}, "10.0.0.1"),
    ("nothing in common", {"others": {"addresses": ()}}, "172.17.0.1"),
    ("netmask unknown", {"first": {"addresses": (HostAddress("10.5.0.1", "ib0", 0),)}}, "10.5.0.1"),
]


@pytest.mark.parametrize(
    ("given", "expected"), [(case[1], case[2]) for case in CHOICES], ids=[case[0] for case in CHOICES]
)
def test_address_is_one_that_was_seen_to_work(given: dict[str, Any], expected: str) -> None:
    chosen = choose_master_address(make_entries(3), answers(**given))
    assert chosen.address == expected and chosen.reason


def test_given_address_comes_before_the_host_list_and_that_before_what_is_found() -> None:
    entries = make_entries(3, address="192.168.7.1", source="hosts.txt, line 1")
    found = answers(reached_as="10.0.0.1")
    assert choose_master_address(entries, found, "fd77:0::1").address == "fd77::1"
    assert choose_master_address(entries, found).address == "192.168.7.1"
    assert choose_master_address(make_entries(3), found).address == "10.0.0.1"


def test_given_name_is_what_node_0_takes_it_for() -> None:
    found = answers(first={"master_address": "192.168.7.1"})
    assert choose_master_address(make_entries(3), found, "head").address == "192.168.7.1"


REFUSED = [
    (
        "10.0.0.2",
        "",
        "--master_addr 10.0.0.2: not an address of h1, the first host, which runs the scheduler; give one of ",
    ),
    (
        "127.0.0.1",
        "",
        "--master_addr 127.0.0.1: other hosts cannot reach 127.0.0.1; give an address of h1 that they can",
    ),
    ("head", "", "--master_addr head: not an address of h1"),
    ("head", "127.0.1.1", "--master_addr head: other hosts cannot reach 127.0.1.1"),
    ("head", "10.0.0.77", "--master_addr head: not an address of h1"),
]


@pytest.mark.parametrize(("given", "resolved", "text"), REFUSED)
def test_address_that_node_0_does_not_have_is_refused(given: str, resolved: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_master_address(make_entries(3), answers(first={"master_address": resolved}), given)
    assert str(caught.value).startswith(text)


def test_wrong_address_in_the_host_list_names_its_line() -> None:
    entries = make_entries(3, address="10.0.0.99", source="hosts.txt, line 1")
    with pytest.raises(UsageError, match=r"hosts.txt, line 1: address 10.0.0.99: not an address of h1"):
        choose_master_address(entries, answers())


def test_host_without_any_address_needs_one_given() -> None:
    with pytest.raises(UsageError, match="give --master_addr"):
        choose_master_address(make_entries(3), answers(first={"addresses": ()}))


def test_one_host_needs_no_address_that_others_reach() -> None:
    assert choose_master_address(make_entries(1), {0: answers()[0]}).address == "127.0.0.1"
