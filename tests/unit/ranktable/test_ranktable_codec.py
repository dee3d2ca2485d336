"""Dialect 1.0 to the model and back, and the names of the dialects that are not read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktable import Device, RankTable, Server, encode_table, parse_table
from ranktable.errors import BuildError, InvalidTableError, UnknownDialectError, UnsupportedDialectError
from ranktable.kinds import detect_dialect, dialect_of
from ranktable.text import render_json

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=6,
)
EXTRAS = st.dictionaries(st.text(min_size=1).map(lambda key: "x_" + key), JSON_VALUES, max_size=3)
MAYBE_TEXT = st.none() | st.text()
NUMBERS = st.integers(0, 10**10 - 1)
DEVICES = st.builds(Device, NUMBERS, NUMBERS, MAYBE_TEXT, extra=EXTRAS)
SERVERS = st.builds(
    Server, st.text(), st.lists(DEVICES, min_size=1, max_size=3).map(tuple), MAYBE_TEXT, MAYBE_TEXT, extra=EXTRAS
)
TABLES = st.builds(
    RankTable,
    st.just("1.0"),
    st.lists(SERVERS, min_size=1, max_size=3).map(tuple),
    st.text(),
    st.none() | NUMBERS,
    extra=EXTRAS,
)


@given(TABLES)
def test_a_table_survives_encoding_and_decoding(table):
    assert parse_table(encode_table(table)) == table


@given(st.dictionaries(st.text(), JSON_VALUES))
def test_the_layout_does_not_change_the_value(value):
    assert json.loads(render_json(value)) == value


def test_keys_that_are_not_known_are_written_back():
    device = {"device_id": "0", "rank_id": "0", "device_port": "16666", "colour": {"deep": [1, None]}}
    server = {"server_id": "a", "device": [device], "host_nic_ip": "reserve"}
    value = {"version": "1.0", "server_list": [server], "status": "completed", "data_version": 3}
    assert json.loads(encode_table(parse_table(json.dumps(value)))) == value


def test_a_device_stands_on_one_line():
    table = RankTable("1.0", (Server("a", (Device(0, 0, "10.0.0.1"), Device(1, 1, "10.0.0.2"))),))
    assert '{"device_id": "1", "device_ip": "10.0.0.2", "rank_id": "1"}\n' in encode_table(table)


def test_a_dialect_without_a_codec_is_not_written():
    with pytest.raises(BuildError, match=r"dialect '9\.9' is not known"):
        encode_table(RankTable("9.9", ()))


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


def test_a_repeated_key_is_not_decoded():
    with pytest.raises(InvalidTableError, match="stands twice"):
        parse_table('{"version": "1.0", "version": "1.0", "status": "completed", "server_list": []}')


ONE = {"server_id": "a", "device": [{"device_id": "0", "rank_id": "0"}]}
DIALECTS = [
    ({"version": "1.0", "server_list": [ONE]}, "1.0"),
    ({"server_list": [ONE]}, "1.0"),
    ({"version": "1.0"}, "1.0"),
    ({"version": "1.0", "server_list": [ONE], "super_pod_list": []}, "1.0"),
    ({"version": "1.0", "server_list": [ONE], "cluster_list": [{"server_list": []}]}, "cross-cluster"),
    ({"version": "1.0", "server_list": [ONE], "data_version": 2}, "1.0"),
    ({"version": "1.2", "server_list": [ONE], "super_pod_list": []}, "1.2"),
    ({"version": "1.2", "server_list": [ONE]}, "1.2"),
    ({"version": "1.2", "server_list": [{"server_id": "a", "device": [{"device_id": "0"}]}]}, "local-comm-res"),
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
    ({"version": "1.1", "node_list": [{"rank_list": []}]}, "1.1-offline"),
    ({"version": "1.1", "collective_id": "w"}, "1.1"),
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


@pytest.mark.parametrize("value", [value for value, name in DIALECTS if dialect_of(name).codec is None])
def test_another_dialect_is_refused_by_its_name(value):
    with pytest.raises(UnsupportedDialectError) as caught:
        parse_table(json.dumps(value), "t.json")
    assert caught.value.dialect in str(caught.value)
    assert caught.value.evidence in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("value", "hint"),
    [({}, "has 'server_list' at its top"), ({"serverList": []}, "rename 'serverList'"), ({"a": 1}, "'server_list'")],
)
def test_json_without_a_telling_key_is_no_rank_table(value, hint):
    with pytest.raises(UnknownDialectError) as caught:
        parse_table(json.dumps(value))
    assert hint in str(caught.value)
