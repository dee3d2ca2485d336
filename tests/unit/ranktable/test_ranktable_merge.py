"""One table out of several: nothing twice, a stated order, and the parts of a table give it back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_strategies import faulty_tables, tables

from ranktable import (
    Device,
    EditError,
    NotReadyError,
    RankTable,
    RankTableError,
    Server,
    build_table,
    merge_tables,
    read_table,
    validate_table,
)
from ranktable.ordering import MERGE_ORDERS
from ranktable.sources.collect import read_hostfile
from ranktable.tables import encode_table

DIALECTS = st.sampled_from(["1.0", "1.2", "volcano-job", "volcano-global", "cross-cluster"])

CATALOGUE = Path(__file__).parent / "catalogue"


def parts_of(table):
    """Return a table for each server, with its super pod, clusters and group, and the ranks that it has."""
    parts = []
    for server in table.servers:
        pods = tuple(
            replace(pod, server_ids=(server.server_id,))
            for pod in table.super_pods
            if server.server_id in pod.server_ids
        )
        pod_ids = {pod.super_pod_id for pod in pods}
        clusters = tuple(
            replace(
                cluster,
                server_ids=tuple(name for name in cluster.server_ids if name == server.server_id),
                super_pod_ids=tuple(name for name in cluster.super_pod_ids if name in pod_ids),
            )
            for cluster in table.clusters
            if server.server_id in cluster.server_ids or pod_ids & set(cluster.super_pod_ids)
        )
        groups = tuple(group for group in table.groups if group.name == server.group)
        count = None if table.declared_server_count is None else 1
        parts.append(
            replace(
                table,
                servers=(server,),
                declared_server_count=count,
                super_pods=pods,
                clusters=clusters,
                groups=groups,
            )
        )
    return parts


@pytest.mark.parametrize("path", sorted(CATALOGUE.rglob("good_*.json")), ids=lambda path: path.stem)
def test_the_parts_of_a_good_table_of_any_kind_give_it_back(path):
    table = read_table(path)
    if table.dialect in ("mindie-global", "template2-cloud"):
        with pytest.raises(EditError, match=r"the ranks start again in each of its groups|cannot have the order"):
            merge_tables([table], order="rank")
        return
    merged = merge_tables(parts_of(table), order="rank").table
    assert merged == table
    assert encode_table(merged) == encode_table(table)


@settings(max_examples=30)
@given(DIALECTS.flatmap(tables))
def test_the_parts_of_a_table_that_keep_their_ranks_give_it_back(table):
    merged = merge_tables(parts_of(table), order="rank").table
    assert merged == table
    assert encode_table(merged) == encode_table(table)


@settings(max_examples=25)
@given(DIALECTS.flatmap(tables), st.sampled_from(["server_id", "numeric", "host_file"]), st.data())
def test_the_order_of_the_arguments_does_not_matter_to_a_stated_order(table, order, data):
    ids = sorted(server.server_id for server in table.servers)
    hosts = data.draw(st.permutations(ids)) if order == "host_file" else None
    parts = parts_of(table)
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
    holes = [RankTable("1.0", (Server("a", (Device(0, 0),)), Server("b", (Device(0, 2),))))]
    assert "warning: the ranks had holes, which are closed" in _notes(holes, order="rank")
    crossed = RankTable("1.0", (Server("a", (Device(0, 1), Device(1, 2))), Server("b", (Device(0, 0), Device(1, 3)))))
    assert "table 1: its ranks 0-3 are 0-3 now, in another order" in _notes([crossed])


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
        lambda: merge_tables([replace(first, dialect="1.2")], order=order, allow_initializing=True),
    ):
        try:
            edit()
        except RankTableError as error:
            assert "\n" not in str(error)


def test_every_order_is_tried_above():
    assert set(MERGE_ORDERS) == {"server_id", "numeric", "argument", "host_file", "rank"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("# head\nnode2 slots=8\n\nroot@10.0.0.9 slots=8 # x\n", ["node2", "10.0.0.9"]),
        ("me@b slots=2\nme@b slots=2\nme@a slots=4\n", ["b", "a"]),
        ("node9:8\nnode10:8\n", ["node9", "node10"]),
        ("node[08-09]\nlogin\n", ["node08", "node09", "login"]),
        ("fe80::1\n10.0.0.2\n", ["fe80::1", "10.0.0.2"]),
    ],
)
def test_the_order_of_hosts_is_read_from_the_files_that_generate_takes(tmp_path, text, hosts):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert [host.name for host in read_hostfile(str(path))] == hosts


@pytest.mark.parametrize("data", [b"\xff\xfe", b"", b"a slots=x\n"])
def test_files_without_hosts_are_refused(tmp_path, data):
    path = tmp_path / "hosts"
    path.write_bytes(data)
    with pytest.raises(RankTableError):
        read_hostfile(str(path))


def write(name, hosts, **options):
    """Write a table and return its text."""
    text = encode_table(build_table(hosts, **options))
    Path(name).write_text(text)
    return text


def test_merge_prints_and_says_its_order(run):
    write("b.json", [("10.0.0.9", 1)])
    write("a.json", [("10.0.0.10", 1)])
    status, out, err = run("merge", "b.json", "a.json")
    assert status == 0
    assert [server["server_id"] for server in json.loads(out)["server_list"]] == ["10.0.0.10", "10.0.0.9"]
    assert err.splitlines()[:2] == [
        "ranktable: servers follow the string order of their ids; rank 0 is on 10.0.0.10",
        "ranktable: that is not the order of the arguments",
    ]


def test_merge_takes_the_order_of_a_host_file(run):
    write("a.json", [("a", 1)])
    write("b.json", [("b", 1)])
    Path("hosts").write_text("b slots=1\na slots=1\n")
    for options in (["--hostfile", "hosts"], ["--order", "host-file", "--hostfile", "hosts"]):
        _, out, err = run("merge", "a.json", "b.json", *options)
        assert [server["server_id"] for server in json.loads(out)["server_list"]] == ["b", "a"]
        assert "servers follow the order of the host list" in err


def test_merge_lists_conflicts_and_leaves_the_file_that_is_there(run):
    write("a.json", [("a", 1), ("b", 1)])
    Path("m.json").write_text("mine")
    status, out, err = run("merge", "a.json", "a.json", "-o", "m.json")
    assert (status, out) == (1, "")
    assert err.splitlines() == [
        "ranktable: error: a.json: server a stands in a.json already; leave one out",
        "ranktable: error: a.json: server b stands in a.json already; leave one out",
        "ranktable: nothing is written",
    ]
    assert Path("m.json").read_text() == "mine"
    write("many.json", [(f"n{number}", 1) for number in range(30)])
    assert "ranktable: and 10 more\n" in run("merge", "many.json", "many.json")[2]


def test_merge_waits_for_a_table_that_is_not_completed(run):
    write("a.json", [("a", 1)])
    Path("b.json").write_text(write("b.json", [("b", 1)]).replace("completed", "initializing"))
    status, out, err = run("merge", "a.json", "b.json")
    assert (status, out) == (3, "")
    assert "b.json is not ready" in err
    status, out, _ = run("merge", "--allow_initializing", "a.json", "b.json")
    assert (status, json.loads(out)["status"]) == (0, "initializing")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["merge"], "Missing argument"),
        (["merge", "none.json"], "cannot read none.json"),
        (["merge", "t.json", "--order", "host_file"], "--order host_file and --hostfile FILE go together"),
        (["merge", "t.json", "--order", "rank", "--hostfile", "t.json"], "go together; give both, or neither"),
        (["merge", "t.json", "--hostfile", "none"], "cannot read none"),
        (["merge", "t.json", "--order", "random"], "random"),
        (["merge", "t.json", "-o", "no/m.json"], "create the folder no first"),
    ],
)
def test_a_mistake_of_the_user_is_one_line(run, arguments, says):
    write("t.json", [("10.0.0.9", 2), ("10.0.0.10", 2)])
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("ranktable: error: ")
    assert err.count("\n") == 1
    assert says in err
