"""Dialects: known by their keys; a table is read back as it was written, and what has no place is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_strategies import tables

from ranktable import Device, RankTable, Server, SuperPod, encode_table, parse_table
from ranktable.errors import BuildError, InvalidTableError, UnknownDialectError, UnsupportedDialectError
from ranktable.kinds import detect_dialect, dialect_of, written_names
from ranktable.tables import encode_document
from ranktable.values import render_json

HERE = Path(__file__).parent
FILES = sorted([*HERE.glob("changes/*.json"), *HERE.glob("catalogue/*/good_*.json")])
ONE = {"server_id": "a", "device": [{"device_id": "0", "rank_id": "0"}]}
DIALECTS = [
    ({"version": "1.0", "server_list": [ONE]}, "1.0"),
    ({"server_list": [ONE]}, "1.0"),
    ({"version": "1.0", "server_list": [ONE], "super_pod_list": []}, "1.0"),
    ({"version": "1.0", "server_list": [ONE], "cluster_list": [{"server_list": []}]}, "cross-cluster"),
    ({"version": "1.2", "server_list": [ONE]}, "1.2"),
    ({"version": "1.2", "server_list": [{"server_id": "a", "device": [{"device_id": "0"}]}]}, "local-comm-res"),
    ({"version": "1.2", "server_list": [{"server_id": "a", "device": [{"rankId": "0"}]}]}, "1.2"),
    ({"version": "1.3", "endpoint_list": []}, "local-comm-res"),
    ({"version": "1.3", "server_list": [ONE], "data_version": 2}, "volcano-job"),
    ({"version": "1.4", "server_list": [ONE], "cluster_list": []}, "volcano-global"),
    ({"version": "1.1", "node_list": [{"ranks": []}]}, "1.1"),
    ({"version": "2.0", "rank_count": 1, "rank_list": [{"level_list": [{"net_layer": 0}]}]}, "2.0"),
    ({"version": "2.0", "rank_list": [{"level_list": [{"fabric_type": "x"}]}]}, "2.0-draft"),
    ({"version": "2.0", "server_list": [ONE], "oxc_group_list": []}, "2.0-oxc"),
    ({"group_list": [{"instance_list": []}]}, "template2-cloud"),
    ({"group_list": [], "board_id": "0x0000", "deploy_mode": "lab"}, "template2-lab"),
    ({"group_list": [{"instance_list": [{"rank_id": "0"}]}]}, "template2-lab"),
    ({"group_list": [{"instance_list": [{"rank_id": "0", "pod_name": "p"}]}]}, "template2-cloud"),
    ({"group_list": [], "board_id": "0x0000"}, "template2-cloud"),
    ({"version": "1.1", "node_list": [{"rank_list": []}]}, "1.1"),
    ({"Servers": [], "Clients": []}, "roles"),
    ({"version": "1.0", "server_group_list": []}, "mindie-global"),
    ({"version": "1.2", "prefill_device_list": [], "server_list": []}, "vllm-pd"),
    ({"server_list": [{"pod_name": "p", "device": [{"tor_ip": "1.1.1.1"}]}]}, "tor-list"),
]


@pytest.mark.parametrize(("value", "name"), DIALECTS, ids=[f"{name}-{n}" for n, (_, name) in enumerate(DIALECTS)])
def test_a_dialect_is_known_by_its_keys(value, name):
    detection = detect_dialect(value)
    assert detection.dialect.name == name
    assert detection.evidence
    if dialect_of(name).schema is None:
        with pytest.raises(UnsupportedDialectError) as caught:
            parse_table(json.dumps(value), "t.json")
        assert detection.evidence in str(caught.value)
        assert caught.value.dialect in str(caught.value)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("value", "hint"),
    [({}, "has 'server_list' at its top"), ({"serverList": []}, "rename 'serverList'"), ({"a": 1}, "'server_list'")],
)
def test_json_without_a_telling_key_is_no_rank_table(value, hint):
    with pytest.raises(UnknownDialectError) as caught:
        parse_table(json.dumps(value))
    assert hint in str(caught.value)


@pytest.mark.parametrize("path", FILES, ids=[f"{path.parent.name}-{path.stem}" for path in FILES])
def test_every_key_of_a_good_file_is_written_back_or_the_kind_is_only_read(path):
    table = parse_table(path.read_text(encoding="utf-8"))
    if table.dialect in written_names():
        assert json.loads(encode_table(table)) == json.loads(path.read_text(encoding="utf-8"))
    else:
        with pytest.raises(BuildError, match=r"cannot be written; convert it to one of 1\.0, 1\.2"):
            encode_table(table)


def read_base(name, **changes):
    return json.loads((HERE / "changes" / f"{name}.json").read_text()) | changes


def test_cloud_ranks_follow_server_ids_as_strings_then_device_ids_over_all_groups():
    def pod(name, server_id, *ids):
        return {"pod_name": name, "server_id": server_id, "devices": [{"device_id": str(each)} for each in ids]}

    first = [pod("p", "10.0.0.9", 1), pod("q", "10.0.0.10", 5, 2)]
    groups = [
        {"group_name": pods[0]["pod_name"], "instance_count": "1", "device_count": "1", "instance_list": pods}
        for pods in (first, [pod("r", "10.0.0.9", 0)])
    ]
    table = parse_table(json.dumps({"status": "completed", "group_count": "2", "group_list": groups}))
    ranks = {(server.server_id, device.device_id): device.rank_id for server, device in table.placements}
    assert ranks == {("10.0.0.10", 2): 0, ("10.0.0.10", 5): 1, ("10.0.0.9", 0): 2, ("10.0.0.9", 1): 3}


def test_what_the_model_says_of_each_dialect():
    pods = parse_table(json.dumps(read_base("super_pods")))
    assert [pod.super_pod_id for pod in pods.super_pods]
    assert [name for pod in pods.super_pods for name in pod.server_ids] == [each.server_id for each in pods.servers]
    version_2 = read_base("v2_0")
    del version_2["status"]
    assert parse_table(json.dumps(version_2)).is_ready
    first = parse_table(json.dumps(read_base("v2_0"))).servers[0]
    assert first.server_id == version_2["rank_list"][0]["level_list"][0]["net_instance_id"]
    service = parse_table(json.dumps(read_base("service")))
    assert {server.group for server in service.servers} >= {"2"}
    assert all(server.server_id for server in service.servers), "a coordinator goes by its server_ip"
    with pytest.raises(BuildError, match="several groups of the table have a rank 0"):
        service.server_of(0)


SERVER = Server("a", (Device(0, 0),))


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (RankTable("9.9", ()), r"dialect '9\.9' is not known"),
        (RankTable("1.0", (SERVER,), super_pods=(SuperPod("0", ("a",)),)), "super pods"),
        (RankTable("1.0", (Server("a", (Device(0, 0, super_device_id="1"),)),)), "super device ids"),
    ],
)
def test_what_a_dialect_has_no_place_for_is_not_written(table, says):
    with pytest.raises(BuildError, match=says):
        encode_table(table)


def test_decoding_reports_every_fault_of_the_structure():
    with pytest.raises(InvalidTableError) as caught:
        parse_table('{"version": "1.0", "status": 1, "server_list": [{"device": [{"device_id": "x"}, 3]}]}', "t.json")
    assert [(problem.rule, problem.path) for problem in caught.value.problems] == [
        ("R4", "status"),
        ("R5", "server_list[0].server_id"),
        ("R5", "server_list[0].device[1]"),
        ("R8", "server_list[0].device[0].device_id"),
        ("R5", "server_list[0].device[0].rank_id"),
    ]
    assert "(and 4 more)" in str(caught.value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.text(max_size=5), children, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("dialect", ["1.0", "1.2"])
def test_a_table_survives_both_ways(dialect):
    @settings(deadline=None, max_examples=40)
    @given(tables(dialect), JSON_VALUES)
    def check(drawn, extra):
        table = replace(drawn, extra={"x_1": extra}, servers=(replace(drawn.servers[0], extra={"x_2": extra}),))
        value = encode_document(table)
        assert parse_table(json.dumps(value)) == table
        assert encode_document(parse_table(encode_table(table))) == value

    check()


@given(st.dictionaries(st.text(), JSON_VALUES))
def test_the_layout_does_not_change_the_value(value):
    assert json.loads(render_json(value)) == value
