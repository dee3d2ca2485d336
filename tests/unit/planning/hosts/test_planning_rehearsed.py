"""The words of --rehearse."""

from __future__ import annotations

import ipaddress

import pytest

from msrun.errors import UsageError
from msrun.planning.hosts.assignment import MAX_HOSTS, parse_rehearsal


def test_every_host_has_a_name_and_a_loopback_address_of_its_own() -> None:
    entries = parse_rehearsal(f"{MAX_HOSTS}x1")
    addresses = {ipaddress.ip_address(entry.address) for entry in entries}
    assert len({entry.name for entry in entries}) == len(addresses) == MAX_HOSTS
    assert all(address.is_loopback for address in addresses) and ipaddress.ip_address("127.0.0.1") not in addresses
    assert all(entry.is_rehearsed and entry.device_ids == (0,) for entry in entries)


def test_hosts_without_workers_leave_these_to_other_options() -> None:
    assert [entry.slots for entry in parse_rehearsal("3")] == [0, 0, 0]


@pytest.mark.parametrize("text", ["", "x", "2x", "x2", "0x2", "2x0", "2X2", "2x2x2", "-1x2", "2 x 2", "2x2;id", "two"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--rehearse .*give HOSTSxWORKERS"):
        parse_rehearsal(text)


@pytest.mark.parametrize("text", ["251x1", "1x4097", "9" * 40 + "x1"])
def test_too_many_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="250 hosts of 4096 workers are the most"):
        parse_rehearsal(text)
