"""One table out of several: nothing twice, a stated order, and the parts of a table give it back."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_strategies import faulty_tables, tables

from ranktable import (
    Cluster,
    ClusterPart,
    Device,
    EditError,
    Group,
    MergeError,
    NotReadyError,
    RankTable,
    RankTableError,
    Server,
    SuperPod,
    build_table,
    diff_tables,
    merge_clusters,
    merge_tables,
    parse_table,
    read_table,
    select_devices,
    split_table,
    validate_table,
)
from ranktable.codec import encode_table
from ranktable.edit.ordering import MERGE_ORDERS

DIALECTS = st.sampled_from(["1.0", "1.2", "volcano-job", "volcano-global", "cross-cluster"])
UNITS = st.sampled_from(["server", 1, 2, 3])

CATALOGUE = Path(__file__).parent / "catalogue"


@pytest.mark.parametrize("path", sorted(CATALOGUE.rglob("good_*.json")), ids=lambda path: path.stem)
def test_the_parts_of_a_good_table_of_any_kind_give_it_back(path):
    table = read_table(path)
    if table.dialect == "mindie-global":
        with pytest.raises(EditError, match="the ranks start again in each of its groups"):
            split_table(table, "server")
        return
    has_ranks = table.dialect != "template2-cloud"
    parts = [part.table for part in split_table(table, "server", keep_ranks=has_ranks).parts]
    parts = [parse_table(encode_table(part)) for part in parts]
    merged = merge_tables(parts, order="rank" if has_ranks else "server_id").table
    assert merged == table
    assert encode_table(merged) == encode_table(table)


@settings(max_examples=30)
@given(DIALECTS.flatmap(tables), UNITS)
def test_the_parts_of_a_table_that_keep_their_ranks_give_it_back(table, unit):
    parts = [part.table for part in split_table(table, unit, keep_ranks=True).parts]
    merged = merge_tables(parts, order="rank").table
    assert merged == table
    assert encode_table(merged) == encode_table(table)


@settings(max_examples=20)
@given(DIALECTS.flatmap(lambda dialect: tables(dialect, scattered=False)), UNITS)
def test_the_parts_of_a_table_whose_ranks_follow_its_list_give_it_back(table, unit):
    parts = [part.table for part in split_table(table, unit).parts]
    assert all(
        sorted(device.rank_id for _, device in part.placements) == list(range(part.world_size)) for part in parts
    )
    assert merge_tables(parts, order="argument").table == table


@settings(max_examples=20)
@given(tables("1.2"))
def test_the_super_pods_of_a_table_give_it_back_but_for_the_order_of_the_list(table):
    parts = [part.table for part in split_table(table, "super_pod", keep_ranks=True).parts]
    assert [len(part.super_pods) for part in parts] == [1] * len(table.super_pods)
    assert diff_tables(merge_tables(parts, order="rank").table, table) == ()


@settings(max_examples=20)
@given(tables(), st.data())
def test_a_choice_of_servers_and_the_rest_keep_the_placement(table, data):
    ids = [server.server_id for server in table.servers]
    chosen = data.draw(st.sets(st.sampled_from(ids), min_size=1))
    halves = [
        select_devices(table, servers=half, keep_ranks=True).table for half in (chosen, set(ids) - chosen) if half
    ]
    assert diff_tables(merge_tables(halves, order="rank").table, table) == ()


@settings(max_examples=25)
@given(DIALECTS.flatmap(tables), st.sampled_from(["server_id", "numeric", "host_file"]), st.data())
def test_the_order_of_the_arguments_does_not_matter_to_a_stated_order(table, order, data):
    ids = sorted(server.server_id for server in table.servers)
    hosts = data.draw(st.permutations(ids)) if order == "host_file" else None
    parts = [part.table for part in split_table(table, "server").parts]
    merged, other = (
        merge_tables(mixed, order=order, hosts=hosts).table for mixed in (parts, data.draw(st.permutations(parts)))
    )
    assert merged == other
    assert [device.rank_id for server in merged.servers for device in sorted(server.devices, key=_rank)] == list(
        range(table.world_size)
    )
    assert not [problem for problem in validate_table(merged, device_target="cpu") if problem.is_error]
    listed = [server.server_id for server in merged.servers]
    assert listed == (hosts or (ids if order == "server_id" else listed))


def _rank(device):
    return device.rank_id


ONES = [build_table([(name, 2)]) for name in ("10.0.0.10", "10.0.0.9", "10.0.0.11")]


@pytest.mark.parametrize(
    ("order", "hosts", "ids"),
    [
        ("server_id", None, ["10.0.0.10", "10.0.0.11", "10.0.0.9"]),
        ("numeric", None, ["10.0.0.9", "10.0.0.10", "10.0.0.11"]),
        ("argument", None, ["10.0.0.10", "10.0.0.9", "10.0.0.11"]),
        ("host_file", ["other", "10.0.0.11", "10.0.0.9", "10.0.0.10"], ["10.0.0.11", "10.0.0.9", "10.0.0.10"]),
    ],
)
def test_the_order_decides_over_list_and_ranks(order, hosts, ids):
    merged = merge_tables(ONES, order=order, hosts=hosts).table
    assert [server.server_id for server in merged.servers] == ids
    assert [device.rank_id for _, device in merged.placements] == list(range(6))
    assert merged.declared_server_count == 3


def test_host_files_may_name_the_address_of_a_host():
    named = [
        replace(table, servers=(replace(table.servers[0], host_ip=f"10.1.0.{n}"),)) for n, table in enumerate(ONES)
    ]
    merged = merge_tables(named, order="host_file", hosts=["10.1.0.2", "10.1.0.0", "10.0.0.9"]).table
    assert [server.server_id for server in merged.servers] == ["10.0.0.11", "10.0.0.10", "10.0.0.9"]


def test_within_a_table_the_order_of_its_ranks_is_kept():
    """The file lists the server of the ranks 2 and 3 first, and the devices of a server in any order."""
    table = RankTable("1.0", (Server("b", (Device(0, 3), Device(1, 2))), Server("a", (Device(0, 0), Device(1, 1)))))
    merged = merge_tables([build_table([("z", 1)]), table], order="argument").table
    ranks = {(server.server_id, device.device_id): device.rank_id for server, device in merged.placements}
    assert ranks == {("z", 0): 0, ("a", 0): 1, ("a", 1): 2, ("b", 1): 3, ("b", 0): 4}


def _notes(tables, **options):
    return "\n".join(merge_tables(tables, **options).notes)


def test_the_order_is_said_with_what_is_odd_about_it():
    assert "servers follow the string order of their ids; rank 0 is on 10.0.0.10" in _notes(ONES)
    assert "that is not the order of the arguments" in _notes(ONES)
    assert "not the order of the arguments" not in _notes(ONES[:2])
    assert "10.0.0.10 stands before 10.0.0.9, as a shell sorts names" in _notes(ONES[:2], order="argument")
    assert "as a shell sorts" not in _notes(ONES[1:], order="argument")
    assert "as a shell sorts" not in _notes([ONES[0], ONES[2]], order="argument")
    assert "ask for the string order of the server ids (rule R11)" in _notes(ONES, order="numeric")
    assert "table 2: its ranks 0-1 are 4-5 now" in _notes(ONES)
    assert _notes(ONES[:1]) == ""


def test_what_is_joined_corrected_or_odd_is_said():
    first, second = build_table([("a", 2)]), build_table([("b", 1)])
    notes = _notes([replace(first, declared_server_count=5), second], names=["x.json", "y.json"])
    assert "x.json said server_count 5 and lists 1 server" in notes
    assert "warning: the servers have different numbers of devices: b (y.json) has 1, most have 2" in notes
    counted = [replace(first, extra={"data_version": 4, "note": "n"}), replace(second, extra={"data_version": 7})]
    assert merge_tables(counted).table.extra == {"data_version": 7, "note": "n"}
    assert "data_version is 7, the highest of the tables" in _notes(counted)
    assert "note is not in every table" in _notes(counted)
    holes = [select_devices(build_table([("a", 2), ("b", 2)]), ranks=[0, 2], keep_ranks=True).table]
    assert "warning: the ranks had holes, which are closed" in _notes(holes, order="rank")
    crossed = RankTable("1.0", (Server("a", (Device(0, 1), Device(1, 2))), Server("b", (Device(0, 0), Device(1, 3)))))
    assert "table 1: its ranks 0-3 are 0-3 now, in another order" in _notes([crossed])


def _pod_table(server_id, super_device_ids=("0", "1"), pod_id="0", **extra):
    devices = tuple(Device(n, n, None, sdid) for n, sdid in enumerate(super_device_ids))
    pod = SuperPod(pod_id, (server_id,), extra)
    return RankTable("1.2", (Server(server_id, devices),), declared_server_count=1, super_pods=(pod,))


def test_super_pods_of_equal_ids_are_joined():
    merged = merge_tables([_pod_table("a"), _pod_table("b", ("2", "3")), _pod_table("c", pod_id="1")])
    assert [(pod.super_pod_id, pod.server_ids) for pod in merged.table.super_pods] == [("0", ("a", "b")), ("1", ("c",))]
    assert "super pod 0 is joined out of table 1, table 2" in merged.notes


def test_super_pods_whose_servers_are_torn_apart_by_the_order_are_warned_of():
    parts = [_pod_table("a"), _pod_table("b", pod_id="1"), _pod_table("c", ("2", "3"))]
    assert any("R26" in note for note in merge_tables(parts).notes)
    adjacent = merge_tables(parts, order="host_file", hosts=["b", "c", "a"])
    assert not any("R26" in note for note in adjacent.notes)
    assert [(pod.super_pod_id, pod.server_ids) for pod in adjacent.table.super_pods] == [
        ("1", ("b",)),
        ("0", ("c", "a")),
    ]


def test_lists_keep_their_own_order_where_the_ranks_do():
    table = _pod_table("a", pod_id="1")
    table = replace(
        table, servers=(*table.servers, replace(_pod_table("b").servers[0], devices=(Device(0, 2, None, "5"),)))
    )
    table = replace(table, declared_server_count=2, super_pods=(SuperPod("0", ("b",)), *table.super_pods))
    assert merge_tables([table], order="rank").table == table
    assert [pod.super_pod_id for pod in merge_tables([table]).table.super_pods] == ["1", "0"]


def test_groups_of_equal_names_are_joined():
    def group_table(server_id, *names):
        servers = tuple(Server(server_id, (Device(n, n),), group=name) for n, name in enumerate(names))
        return RankTable("1.0", servers, groups=tuple(Group(name) for name in names))

    with pytest.raises(MergeError, match="server a stands in table 1 already"):
        merge_tables([group_table("a", "g"), group_table("a", "g")])
    from ranktable.edit.join import join_groups

    joined = join_groups((name, group_table(name, "g", name).groups) for name in ("x", "y"))
    assert [group.name for group in joined.items] == ["g", "x", "y"]
    assert joined.conflicts == []


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
            ["y0: device 0 of server b has the device_ip 10.1.0.2, as has device 1 of server a in x"],
        ),
        ([_with_ip(IPS[1], "10.1.7.7,10.1.0.1")], "server_id", ["y0: device 0 of server b has the device_ip 10.1.0.1"]),
        (
            [_with_ip(IPS[1], "fe80::1"), _with_ip(build_table([("c", 1)]), "FE80:0::1")],
            "server_id",
            ["y1: device 0 of server c has the device_ip FE80:0::1, as has"],
        ),
        ([IPS[1]], "rank", ["y0: device 0 of server b has rank 0, as has device 0 of server a in x", "has rank 1"]),
        ([replace(IPS[1], dialect="1.2")], "server_id", ["y0: its dialect is 1.2, that of x is 1.0"]),
        (
            [replace(IPS[1], servers=(Server("b", (Device(0, 0), Device(0, 1))),))],
            "argument",
            ["y0: device 0 of server b stands there twice"],
        ),
        (
            [replace(IPS[1], servers=(Server("b", (Device(0, 0), Device(1, 0))),))],
            "argument",
            ["y0: device 1 of server b has rank 0"],
        ),
        ([_with_ip(IPS[1], "fe80::1")], "server_id", ["merged, server_list[1].device[0].device_ip", "IPv4 (R15)"]),
        ([_with_ip(IPS[1], None)], "server_id", ["merged, server_list[1].device[0].device_ip: the key is missing"]),
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
    clone = replace(
        IPS[0], servers=(*IPS[0].servers, Server("c", (Device(0, 5, "10.1.0.1"), Device(1, 6, "10.1.0.2"))))
    )
    with pytest.raises(MergeError, match=r"\(and 2 more\)") as caught:
        merge_tables([IPS[0], clone])
    assert len(caught.value.conflicts) == 3


def test_super_pods_that_only_share_their_id_are_told_apart_by_their_devices():
    with pytest.raises(MergeError, match="super_device_id 0, as has device 0 of server a in table 1 in super pod 0"):
        merge_tables([_pod_table("a"), _pod_table("b")])
    with pytest.raises(MergeError, match="super pod '0' has other keys than in table 1"):
        merge_tables([_pod_table("a"), _pod_table("b", ("2", "3"), note=1)])


def test_a_table_that_is_not_completed_is_merged_on_demand_only():
    waiting = replace(ONES[1], status="initializing")
    with pytest.raises(NotReadyError, match="table 2 is not ready"):
        merge_tables([ONES[0], waiting])
    merged = merge_tables([ONES[0], waiting], allow_initializing=True)
    assert merged.table.status == "initializing"
    assert 'the status is "initializing": that of table 2 is not "completed"' in merged.notes


@pytest.mark.parametrize(
    ("tables", "options", "says"),
    [
        ([], {}, "no table is given"),
        (ONES, {"names": ["x"]}, "3 tables have 1 names"),
        (ONES, {"order": "random"}, "order 'random' is not known; choose one of server_id, argument"),
        (ONES, {"order": "host_file"}, "go together"),
        (ONES, {"hosts": ["a"]}, "go together"),
        (
            ONES,
            {"order": "host_file", "hosts": ["10.0.0.9"]},
            "server '10.0.0.10' (and 1 server more) is not in the list",
        ),
        ([RankTable("1.0", ())], {}, "table 1 lists no device"),
        ([RankTable("mindie-global", (Server("a", (Device(0, 0),)),))], {}, "start again in each of its groups"),
        (
            [RankTable("template2-cloud", (Server("a", (Device(0, 0),)),))],
            {"order": "rank"},
            "cannot have the order 'rank'",
        ),
    ],
)
def test_a_wish_without_a_meaning_is_refused(tables, options, says):
    with pytest.raises(EditError) as caught:
        merge_tables(tables, **options)
    assert says in str(caught.value)
    assert caught.value.remedy


@settings(max_examples=15)
@given(faulty_tables(), faulty_tables(), st.sampled_from(["server_id", "argument", "numeric", "rank"]))
def test_any_tables_give_a_table_or_an_error_of_ours(first, second, order):
    for edit in (
        lambda: merge_tables([first, second], order=order, allow_initializing=True),
        lambda: merge_clusters([ClusterPart("x", "", replace(first, dialect="1.2"), "a")]),
        lambda: split_table(first, "super_pod"),
        lambda: select_devices(first, ranks=[0], devices=[0]),
    ):
        try:
            edit()
        except RankTableError as error:
            assert "\n" not in str(error)


def test_every_order_is_tried_above():
    assert set(MERGE_ORDERS) == {"server_id", "numeric", "argument", "host_file", "rank"}


def _part(cluster_id, job, table, **changes):
    return ClusterPart(cluster_id, job, replace(table, **changes), f"{cluster_id}-{job}.json")


def test_the_tables_of_several_clusters_make_a_global_table():
    parts = [
        _part("west", "1", _pod_table("c", pod_id="2")),
        _part("east", "2", _pod_table("a", ("2", "3")), extra={"data_version": 4}),
        _part("east", "10", _pod_table("b")),
    ]
    parts = [replace(part, table=replace(part.table, extra={"data_version": n})) for n, part in enumerate(parts)]
    merged = merge_clusters(parts)
    table = merged.table
    assert (table.dialect, table.extra, table.status) == ("volcano-global", {"data_version": 3}, "completed")
    assert [server.server_id for server in table.servers] == ["b", "a", "c"]
    assert [device.rank_id for _, device in table.placements] == list(range(6))
    assert table.clusters == (Cluster("east", (), ("0",)), Cluster("west", (), ("2",)))
    assert [(pod.super_pod_id, pod.server_ids) for pod in table.super_pods] == [("0", ("b", "a")), ("2", ("c",))]
    assert "data_version is 3, one more than the highest of the parts" in merged.notes
    assert not any("the highest of the tables" in note for note in merged.notes)
    assert "clusters and jobs in order: east-10.json, east-2.json, west-1.json" in merged.notes
    assert parse_table(encode_table(table)) == table
    assert merge_clusters(reversed(parts)) == merged


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([_part("e", "", ONES[0])], "e-.json: its dialect is 1.0, that of a part is 1.2 or volcano-job"),
        ([_part("e", "", _pod_table("a"), super_pods=())], "it has no super pods"),
        (
            [_part("e", "", _pod_table("a")), _part("f", "", _pod_table("b", ("2", "3")))],
            "super pod 0 is of cluster f and",
        ),
        (
            [_part("e", "j", _pod_table("a")), _part("e", "j", _pod_table("b", ("2", "3")))],
            "job 'j' of cluster e is given",
        ),
        ([_part("e", "", _pod_table("a")), _part("f", "", _pod_table("a", pod_id="1"))], "server a stands in e-.json"),
    ],
)
def test_parts_that_make_no_global_table_are_refused(parts, says):
    with pytest.raises(MergeError) as caught:
        merge_clusters(parts)
    assert says in "\n".join(caught.value.conflicts)


def test_a_global_table_waits_for_its_parts():
    parts = [_part("e", "", _pod_table("a"), status="initializing"), _part("f", "", _pod_table("b", pod_id="1"))]
    with pytest.raises(NotReadyError, match=r"e-\.json"):
        merge_clusters(parts)
    assert merge_clusters(parts, allow_initializing=True).table.status == "initializing"
    with pytest.raises(MergeError, match="the value must be a JSON integer"):
        merge_clusters([_part("e", "", _pod_table("a"), extra={"data_version": "4"})])
    with pytest.raises(EditError, match="no table is given"):
        merge_clusters([])
