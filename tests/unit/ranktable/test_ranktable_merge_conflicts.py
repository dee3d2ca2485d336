"""What cannot stand in one table is told with its file."""

from dataclasses import replace

import pytest

from ranktable import (
    Device,
    MergeError,
    Server,
    build_table,
    merge_tables,
)

IPS = [
    build_table([(name, 2)], device_ips={name: [f"10.1.{place}.1", f"10.1.{place}.2"]})
    for place, name in enumerate("ab")
]


def _with_ip(table, address):
    (server,) = table.servers
    return replace(table, servers=(replace(server, devices=(replace(server.devices[0], device_ip=address),)),))


@pytest.mark.parametrize(
    ("others", "order", "says"),
    [
        ([IPS[0]], "server_id", ["y0: server a stands in x already"]),
        (
            [_with_ip(IPS[1], "10.1.0.2")],
            "server_id",
            ['device 0 of server b in y0: device_ip = "10.1.0.2": the same address stands at device 1 of'],
        ),
        (
            [_with_ip(IPS[1], "10.1.7.7,10.1.0.1")],
            "server_id",
            ['device 0 of server b in y0: device_ip = "10.1.7.7,10.1.0.1": the same address'],
        ),
        (
            [_with_ip(IPS[1], "fe80::1"), _with_ip(build_table([("c", 1)]), "FE80:0::1")],
            "server_id",
            ['device 0 of server c in y1: device_ip = "FE80:0::1": the same address stands at device 0 of'],
        ),
        ([IPS[1]], "rank", ["y0: device 0 of server b has rank 0, as has device 0 of server a in x", "has rank 1"]),
        ([replace(IPS[1], dialect="1.2")], "server_id", ["y0: its dialect is 1.2, that of x is 1.0"]),
        (
            [replace(IPS[1], servers=(Server("b", (Device(0, 0), Device(0, 1))),))],
            "argument",
            ['device 0 of server b in y0: device_id = "0": the same device_id stands at device 0'],
        ),
        (
            [replace(IPS[1], servers=(Server("b", (Device(0, 0), Device(1, 0))),))],
            "argument",
            ["y0: device 1 of server b has rank 0"],
        ),
        ([_with_ip(IPS[1], "fe80::1")], "server_id", ["device 0 of server b in y0: device_ip", "IPv4 (R15)"]),
        ([_with_ip(IPS[1], None)], "server_id", ["device 0 of server b in y0: device_ip: the key is missing"]),
        ([replace(IPS[1], servers=(Server("10.*.*.*", (Device(0, 0, "10.1.7.7"),)),))], "server_id", ["is a mask"]),
        (
            [replace(IPS[1], extra={"k": 1}), replace(build_table([("c", 1)]), extra={"k": True})],
            "server_id",
            ["y1: k is not what y0 says"],
        ),
    ],
)
def test_what_cannot_stand_in_one_table_is_told_with_its_file(others, order, says):
    names = ["x", *(f"y{place}" for place in range(len(others)))]
    with pytest.raises(MergeError) as caught:
        merge_tables([IPS[0], *others], names=names, order=order)
    assert caught.value.exit_code == 1
    for part in says:
        assert part in "\n".join(caught.value.conflicts)


def test_every_conflict_is_told_not_only_the_first():
    clone = replace(IPS[1], servers=(Server("c", (Device(0, 5, "10.1.0.1"), Device(1, 6, "10.1.0.2"), Device(1, 7))),))
    with pytest.raises(MergeError, match=r"\(and 2 more\)") as caught:
        merge_tables([IPS[0], clone], device_target="cpu")
    assert len(caught.value.conflicts) == 3


def test_tables_of_hosts_with_many_cores_are_merged_for_their_target():
    tables = [build_table([(name, 64)]) for name in ("a", "b")]
    with pytest.raises(MergeError, match="highest device number is 31"):
        merge_tables(tables)
    merged = merge_tables(tables, device_target="cpu").table
    assert merged.world_size == 128
