"""Parts of a table: by servers and super pods, by choice, and as shards of its text."""

import json
import stat
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_strategies import tables

from ranktable import (
    Cluster,
    Device,
    EditError,
    Group,
    HostListError,
    JsonTextError,
    RankTable,
    ReadError,
    Server,
    ShardError,
    SuperPod,
    WriteError,
    build_table,
    join_shards,
    renumber_ranks,
    select_devices,
    select_ranks,
    shard_bytes,
    split_table,
    write_shards,
)
from ranktable.edit.select import parse_ranges
from ranktable.edit.shards import parse_size
from ranktable.sources.host_order import read_host_order
from ranktable.write_folder import write_folder

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
        for server, device in select_ranks(table, chosen).table.placements
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
    table = replace(THREE, extra={"rank_count": 9, "k": 1}, groups=(Group("g", {"device_count": "7", "k": 1}),))
    edited = select_ranks(table, [0])
    assert (edited.table.extra, edited.table.groups[0].extra) == ({"k": 1}, {"k": 1})
    assert "rank_count 9 was wrong and is counted anew" in edited.notes
    assert "device_count 7 of group g was wrong and is counted anew" in edited.notes


def test_what_a_choice_did_is_said():
    assert select_ranks(THREE, [0, 1]).notes == ("2 of 6 devices on 1 of 3 servers",)
    assert "ranks 2-5 are ranks 0-3 now" in select_ranks(THREE, range(2, 6)).notes
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


@pytest.mark.parametrize("text", ["", "1,", "a", "3-1", "1-2-3", "-1", "0-9999999", "1" * 20, "٣"])
def test_a_list_that_is_none_is_refused(text):
    with pytest.raises(EditError, match="ranks"):
        parse_ranges(text, "ranks")


@settings(max_examples=25)
@given(st.binary(min_size=1, max_size=5000), st.integers(1024, 3000), st.sampled_from(["none", "gzip"]))
def test_shards_are_small_enough_and_make_up_the_whole_again(tmp_path_factory, data, max_bytes, compression):
    folder = tmp_path_factory.mktemp("folder") / "shards"
    sharded = shard_bytes(data, max_bytes, compression)
    assert all(0 < len(piece) <= max_bytes for piece in sharded.shards.values())
    assert join_shards(write_shards(sharded, folder)) == data


def test_equal_tables_have_equal_shards():
    """No time of day stands in the gzip header."""
    assert shard_bytes(b"x" * 5000, 1024, "gzip").shards["shard_000.bin"][4:8] == b"\0\0\0\0"


DATA = b"".join(number.to_bytes(2, "big") for number in range(1536))


@pytest.fixture
def index(tmp_path):
    return write_shards(shard_bytes(DATA, 1024), tmp_path / "shards")


def change_index(index, **changes):
    index.write_text(json.dumps(json.loads(index.read_text()) | changes))


def test_a_shard_that_was_changed_is_refused(index):
    shard = index.with_name("shard_001.bin")
    shard.write_bytes(b"y" + shard.read_bytes()[1:])
    with pytest.raises(ShardError, match=r"shard_001\.bin: its sha256 is not that of the index"):
        join_shards(index)
    shard.write_bytes(b"")
    with pytest.raises(ShardError, match="it has 0 bytes, the index says 1024"):
        join_shards(index)
    shard.unlink()
    with pytest.raises(ReadError, match=r"shard_001\.bin"):
        join_shards(index)


def test_shards_in_another_order_are_refused(index):
    change_index(index, shards=json.loads(index.read_text())["shards"][::-1])
    with pytest.raises(ShardError, match="the sha256 of the whole is not that of the index"):
        join_shards(index)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "other"}, "it is no index of shards"),
        ({"status": "initializing"}, "its status is not"),
        ({"compression": "zstd"}, "its compression is not known"),
        ({"compression": "gzip"}, "the shards are not gzip"),
        ({"compression": "gzip", "size_bytes": "9"}, "its size_bytes is no size"),
        ({"compression": "gzip", "size_bytes": -1}, "its size_bytes is no size"),
        ({"shards": []}, "it lists no shards"),
        ({"shards": "x"}, "it lists no shards"),
        ({"shards": [3]}, r"shards\[0\] has no proper name"),
        ({"shards": [{"name": "../../etc/passwd", "size_bytes": 1, "sha256": ""}]}, r"shards\[0\] has no proper name"),
        ({"shards": [{"name": "shard_000.bin", "size_bytes": True, "sha256": ""}]}, r"shards\[0\] has no proper name"),
        ({"shards": [{"name": "shard_000.bin", "size_bytes": 10**12, "sha256": ""}]}, "not what it says of the whole"),
        ({"packed_size_bytes": 3000}, "not what it says of the whole"),
        ({"packed_sha256": "0"}, "the sha256 of the whole"),
        ({"sha256": "0"}, "the sha256 of the whole"),
        ({"size_bytes": 7}, "the whole has 3072 bytes, the index says 7"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index, changes, says):
    change_index(index, **changes)
    with pytest.raises(ShardError, match=says) as caught:
        join_shards(index)
    assert caught.value.exit_code == 1


def test_a_small_shard_that_unpacks_to_more_than_it_says_is_refused(tmp_path):
    bomb = shard_bytes(b"\0" * 10**6, 1024, "gzip")
    index = write_shards(bomb, tmp_path / "shards")
    change_index(index, size_bytes=100)
    with pytest.raises(ShardError, match="the whole has 101 bytes, the index says 100"):
        join_shards(index)


def test_an_index_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(JsonTextError):
        join_shards(tmp_path / "index.json")


def test_a_folder_is_there_with_all_of_its_files_or_not_at_all(tmp_path):
    def files():
        yield "a", b"1"
        raise OSError(28, "No space left on device")

    with pytest.raises(WriteError, match="parts: no space left on device"):
        write_folder(tmp_path / "parts", files())
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path / "new" / "parts", [("a", b"1"), ("b", b"2")])
    assert {path.name: path.read_bytes() for path in (tmp_path / "new" / "parts").iterdir()} == {"a": b"1", "b": b"2"}
    assert [stat.S_IMODE((tmp_path / "new" / name).stat().st_mode) for name in ("parts", "parts/a")] == [0o755, 0o644]
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", [("a", b"1")])
    with pytest.raises(WriteError, match="the folder is not empty"):
        write_folder(tmp_path / "empty", [("a", b"1")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "new"]


@pytest.mark.parametrize(
    ("text", "size"), [("800KiB", 819200), ("1MiB", 1048576), ("1024", 1024), ("2 kb", 2000), ("5B", 5)]
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5MiB", "1GiB", "KiB", "9" * 30])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(EditError, match="size"):
        parse_size(text)


def test_shards_that_cannot_be_are_refused():
    with pytest.raises(EditError, match="shards of 5 bytes are too small"):
        shard_bytes(DATA, 5)
    with pytest.raises(EditError, match="nothing to put into shards"):
        shard_bytes(b"", 1024)
    with pytest.raises(EditError, match="choose one of none, gzip"):
        shard_bytes(DATA, 5000, "zstd")


def test_the_order_of_hosts_is_read_from_lists_of_any_tool(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# head\nnode2 slots=8\n\nroot@10.0.0.9:8 # x\nnode[08-09]\nfe80::1\n")
    assert read_host_order(str(path)) == ["node2", "10.0.0.9", "node08", "node09", "fe80::1"]
    for data in (b"\xff\xfe", b"", b"a\na\n"):
        path.write_bytes(data)
        with pytest.raises(HostListError):
            read_host_order(str(path))
