"""The part of a table that a choice of ranks, servers or devices leaves."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_strategies import tables

from ranktable import (
    Cluster,
    EditError,
    Group,
    SuperPod,
    build_table,
    renumber_ranks,
    select_devices,
)
from ranktable.edit.parts import parse_ranges

THREE = build_table([("a", 2), ("b", 2), ("c", 2)])
PODS = replace(
    THREE,
    dialect="1.2",
    super_pods=(SuperPod("0", ("a", "c")), SuperPod("1", ("b",))),
    clusters=(Cluster("east", ("a", "b"), ("1",)), Cluster("west", ("c",), ("0",))),
)


def placement(table):
    return [(server.server_id, device.device_id, device.rank_id) for server, device in table.placements]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"ranks": [5, 2]}, [("b", 0, 0), ("c", 1, 1)]),
        ({"servers": ["c", "a"]}, [("a", 0, 0), ("a", 1, 1), ("c", 0, 2), ("c", 1, 3)]),
        ({"devices": [1]}, [("a", 1, 0), ("b", 1, 1), ("c", 1, 2)]),
        ({"servers": iter("ab"), "devices": iter([0]), "ranks": range(1, 4)}, [("b", 0, 0)]),
        ({"devices": [1], "keep_ranks": True}, [("a", 1, 1), ("b", 1, 3), ("c", 1, 5)]),
        ({}, placement(THREE)),
    ],
)
def test_a_choice_leaves_the_devices_that_all_of_it_names(choice, expected):
    table = select_devices(THREE, **choice).table
    assert placement(table) == expected
    assert table.declared_server_count == len(table.servers)


@settings(max_examples=25)
@given(tables(), st.data())
def test_chosen_ranks_keep_their_order_from_zero_on(table, data):
    chosen = data.draw(st.sets(st.integers(0, table.world_size - 1), min_size=1))
    before = sorted((device.rank_id, server.server_id, device.device_id) for server, device in table.placements)
    after = sorted(
        (device.rank_id, server.server_id, device.device_id)
        for server, device in select_devices(table, ranks=chosen).table.placements
    )
    kept = [entry for entry in before if entry[0] in chosen]
    assert after == [(rank_id, *entry[1:]) for rank_id, entry in enumerate(kept)]


def test_super_pods_clusters_and_groups_are_cut_down_too():
    groups = (Group("g"), Group("h"), Group("empty"))
    servers = tuple(replace(server, group=name) for server, name in zip(PODS.servers, "ghh", strict=True))
    table = replace(PODS, servers=servers, groups=groups)
    cut = select_devices(table, servers=["c"]).table
    assert cut.super_pods == (SuperPod("0", ("c",)),)
    assert cut.clusters == (Cluster("west", ("c",), ("0",)),)
    assert [group.name for group in cut.groups] == ["h", "empty"]
    assert select_devices(table, servers=["b"]).table.clusters == (Cluster("east", ("b",), ("1",)),)


def test_members_that_are_left_keep_their_own_order():
    table = replace(THREE, dialect="1.2", super_pods=(SuperPod("0", ("c", "b", "a")),))
    assert select_devices(table, servers=["a", "c"]).table.super_pods == (SuperPod("0", ("c", "a")),)


def test_wrong_counts_of_a_file_do_not_outlive_a_choice():
    groups = (Group("g", {"device_num": "7", "k": 1}),)
    table = replace(THREE, dialect="template2-lab", extra={"group_count": "9", "k": 1}, groups=groups)
    edited = select_devices(table, ranks=[0])
    assert (edited.table.extra, edited.table.groups[0].extra) == ({"k": 1}, {"k": 1})
    assert "group_count 9 was wrong and is counted anew" in edited.notes
    assert "device_num 7 of group g was wrong and is counted anew" in edited.notes


def test_what_a_choice_did_is_said():
    assert select_devices(THREE, ranks=[0, 1]).notes == ("2 of 6 devices on 1 of 3 servers",)
    assert "ranks 2-5 are ranks 0-3 now" in select_devices(THREE, ranks=range(2, 6)).notes
    kept = select_devices(THREE, servers=["b"], keep_ranks=True).notes
    assert any(note.startswith("the ranks stay 2-3: not a table of its own (rule R9)") for note in kept)
    odd = build_table([("a", 2), ("b", 1)])
    assert "1 server without all of the chosen devices: b" in select_devices(odd, devices=[0, 1]).notes


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"ranks": [6, 7, 9]}, "no device of the table has rank 6-7, 9; the table has 6 devices"),
        ({"servers": ["a", "bb", "x"]}, "no server 'bb' (and 1 more)"),
        ({"servers": ["node1"]}, "see them with"),
        ({"devices": [0, 2]}, "no chosen server has device 2"),
        ({"servers": ["a"], "ranks": [5]}, "no device of the table is left"),
        ({"ranks": []}, "no device of the table is left"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(choice, says):
    with pytest.raises(EditError) as caught:
        select_devices(THREE, **choice)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_dialects_that_cannot_be_cut_are_refused():
    with pytest.raises(EditError, match="start again in each of its groups"):
        select_devices(replace(THREE, dialect="mindie-global"), ranks=[0])
    with pytest.raises(EditError, match="no ranks to keep"):
        select_devices(replace(THREE, dialect="template2-cloud"), ranks=[0], keep_ranks=True)
    with pytest.raises(EditError, match="cannot be renumbered"):
        renumber_ranks(replace(THREE, dialect="mindie-global"))


def test_holes_in_the_ranks_are_closed():
    holed = select_devices(THREE, ranks=[1, 5], keep_ranks=True).table
    assert placement(renumber_ranks(holed)) == [("a", 1, 0), ("c", 1, 1)]
    assert renumber_ranks(THREE) == THREE


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,6", {0, 1, 2, 3, 6}), (" 1 , 1", {1}), ("0-131071", set(range(131072)))]
)
def test_lists_of_numbers_are_read(text, numbers):
    assert parse_ranges(text, "ranks") == numbers


@pytest.mark.parametrize("text", ["", "1,", "a", "3-1", "1-2-3", "-1", "0-9999999", "1" * 20, "٣", "0-999999,0-1"])
def test_a_list_that_is_none_is_refused(text):
    with pytest.raises(EditError, match="ranks"):
        parse_ranges(text, "ranks")
