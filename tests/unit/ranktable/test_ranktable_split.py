"""Parts of a table: by servers and super pods, and by choice."""

from dataclasses import replace

import pytest

from ranktable import (
    Cluster,
    Device,
    EditError,
    RankTable,
    Server,
    SuperPod,
    build_table,
    split_table,
)

THREE = build_table([("a", 2), ("b", 2), ("c", 2)])
PODS = replace(
    THREE,
    dialect="1.2",
    super_pods=(SuperPod("0", ("a", "c")), SuperPod("1", ("b",))),
    clusters=(Cluster("east", ("a", "b"), ("1",)), Cluster("west", ("c",), ("0",))),
)


def placement(table):
    return [(server.server_id, device.device_id, device.rank_id) for server, device in table.placements]


def test_a_table_is_split_per_server():
    parts = split_table(THREE, "server").parts
    assert [part.name for part in parts] == ["part_000_a.json", "part_001_b.json", "part_002_c.json"]
    assert [placement(part.table) for part in parts] == [[(name, 0, 0), (name, 1, 1)] for name in "abc"]
    assert [part.table.declared_server_count for part in parts] == [1, 1, 1]


def test_a_table_is_split_into_numbers_of_servers_that_keep_their_ranks():
    parts = split_table(THREE, 2, keep_ranks=True).parts
    assert [placement(part.table) for part in parts] == [
        [("a", 0, 0), ("a", 1, 1), ("b", 0, 2), ("b", 1, 3)],
        [("c", 0, 4), ("c", 1, 5)],
    ]


def test_a_table_is_split_per_super_pod_and_says_when_pods_were_torn():
    found = split_table(PODS, "super_pod")
    assert [part.name for part in found.parts] == ["part_000_0.json", "part_001_1.json"]
    assert [part.table.super_pods for part in found.parts] == [(SuperPod("0", ("a", "c")),), (SuperPod("1", ("b",)),)]
    assert any("not adjacent in the table (rule R26)" in note for note in found.notes)
    assert any("1 super pod with servers in several parts, such as 0" in note for note in split_table(PODS, 2).notes)
    assert split_table(PODS, 3).notes == ()


def test_names_of_parts_sort_in_the_order_of_the_table_and_are_safe():
    table = build_table([(f"n{number}", 1) for number in range(1001)], order="numeric")
    names = [part.name for part in split_table(table, "server").parts]
    assert names == sorted(names)
    assert names[0] == "part_0000_n0.json"
    odd = replace(THREE, servers=(Server("../fe80::1/\n*" + "x" * 200, (Device(0, 0),)),))
    assert split_table(odd, "server").parts[0].name == f"part_000_.._fe80_1_{'x' * 70}.json"


def test_ranks_that_do_not_follow_the_list_are_a_reason_to_keep_them():
    crossed = replace(THREE, servers=THREE.servers[::-1])
    assert any("--keep_ranks" in note for note in split_table(crossed, "server").notes)
    assert split_table(THREE, "server").notes == ()
    assert any("merge in order rank" in note for note in split_table(THREE, "server", keep_ranks=True).notes)


@pytest.mark.parametrize(
    ("table", "by", "options", "says"),
    [
        (THREE, "super_pod", {}, "has no super pods"),
        (THREE, 0, {}, "a part cannot have 0 servers"),
        (THREE, "device", {}, "cannot be split per 'device'"),
        (replace(PODS, super_pods=PODS.super_pods[:1]), "super_pod", {}, "server 'b' is in 0 super pods"),
        (replace(PODS, super_pods=PODS.super_pods * 2), "super_pod", {}, "server 'a' is in 2 super pods"),
        (replace(THREE, servers=(*THREE.servers, Server("d", ()))), "server", {}, "server 'd' has no devices"),
        (replace(THREE, dialect="mindie-global"), "server", {}, "the ranks start again in each of its groups"),
        (replace(THREE, dialect="template2-cloud"), "server", {"keep_ranks": True}, "has no ranks to keep"),
        (RankTable("1.0", ()), "server", {}, "lists no server"),
    ],
)
def test_a_split_without_a_meaning_is_refused(table, by, options, says):
    with pytest.raises(EditError) as caught:
        split_table(table, by, **options)
    assert says in str(caught.value)
    assert caught.value.remedy
