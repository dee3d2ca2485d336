"""What goes to every host of a job, packed once."""

from __future__ import annotations

import pytest

from msrun.cluster.messages import pack_hosts, pack_text, unpack_hosts, unpack_text
from msrun.planning.host_assignment import HostAssignment


def hosts(count: int) -> tuple[HostAssignment, ...]:
    return tuple(
        HostAssignment(
            node, f"node{node}", f"10.0.{node >> 8}.{node & 255}", tuple(range(8 * node, 8 * node + 8)), (7, 3)
        )
        for node in range(count)
    )


@pytest.mark.parametrize("text", ["", "{}", 'ünïcode ☃ "\n', "no text \udcff"])
def test_text_arrives_as_it_was(text: str) -> None:
    assert unpack_text(pack_text(text)) == text
    assert pack_text(text).isascii()


@pytest.mark.parametrize("count", [0, 1, 300])
def test_hosts_arrive_as_they_were(count: int) -> None:
    assert unpack_hosts(pack_hosts(hosts(count))) == hosts(count)


def test_a_thousand_hosts_are_a_few_bytes_each() -> None:
    assert len(pack_hosts(hosts(1000))) < 16 * 1000
