"""Hosts out of the annotations of pods, as kubectl prints them."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import RankTableError, SourceError, build_table, validate_table
from ranktable.sources.pods import CONFIGURATION, parse_pods, read_pods


def configuration(server, devices=(0, 1), **more):
    entries = [{"device_id": str(number), "device_ip": f"192.168.{server}.{number + 1}"} for number in devices]
    return {"pod_name": f"p{server}", "server_id": f"10.0.0.{server}", "devices": entries, **more}


def pod(name, value, rank_index=None, phase="Running", **annotations):
    marks = {CONFIGURATION: json.dumps(value)} if value else {}
    marks |= {"hccl/rankIndex": str(rank_index)} if rank_index is not None else {}
    status = {"phase": phase, "hostIP": "10.9.9.9", "podIP": "172.1.1.1"}
    return {"kind": "Pod", "metadata": {"name": name, "annotations": {**marks, **annotations}}, "status": status}


def parse(value):
    return parse_pods(json.dumps(value).encode(), "pods.json")


TWO = [pod("w-1", configuration(2), 1), pod("w-0", configuration(9), 0)]


@pytest.mark.parametrize("dump", [json.dumps, yaml.safe_dump])
@pytest.mark.parametrize(
    "wrap", [lambda pods: {"kind": "List", "items": pods}, lambda pods: pods], ids=["kubectl", "list"]
)
def test_pods_stand_in_the_order_of_their_rank_index(tmp_path, dump, wrap):
    (tmp_path / "pods").write_text(dump(wrap(TWO)))
    hosts = read_pods(str(tmp_path / "pods")).hosts
    assert [(host.server_id, host.rank_index, host.host_ip, host.pod_ip) for host in hosts] == [
        ("10.0.0.9", 0, "10.9.9.9", "172.1.1.1"),
        ("10.0.0.2", 1, "10.9.9.9", "172.1.1.1"),
    ]
    table = build_table(hosts, order="rank_index", chip="a2")
    assert [(device.rank_id, device.device_ip) for _, device in table.placements] == [
        (0, "192.168.9.1"),
        (1, "192.168.9.2"),
        (2, "192.168.2.1"),
        (3, "192.168.2.2"),
    ]
    assert [problem.rule for problem in validate_table(table, chip="a2")] == ["R11"]


def test_documents_of_yaml_are_pods_too():
    text = "---\n".join(yaml.safe_dump(value) for value in TWO)
    assert len(parse_pods(text.encode()).hosts) == 2


def test_values_of_the_annotation_stand_for_pods():
    as_text = json.dumps(configuration(1, super_pod_id=3))
    (first, second) = parse([as_text, configuration(2)]).hosts
    assert (first.server_id, first.super_pod_id, first.rank_index) == ("10.0.0.1", "3", None)
    assert (second.server_id, second.origin) == ("10.0.0.2", "pods.json: pod p2")


def test_super_pods_are_read():
    value = configuration(1, devices=())
    value["devices"] = [{"device_id": "0", "super_device_id": 37748736}]
    (host,) = parse([pod("a", value, 0, super_pod_id="7")]).hosts
    assert (host.super_pod_id, host.devices[0].super_device_id, host.devices[0].device_ip) == ("7", "37748736", None)


def test_pods_on_one_host_are_one_server():
    (host, other) = parse(
        [pod("a", configuration(1), 0), pod("b", configuration(1, devices=(4, 5)), 1), pod("c", configuration(2), 2)]
    ).hosts
    assert [device.device_id for device in host.devices] == [0, 1, 4, 5]
    assert host.pod_ip is None
    assert other.server_id == "10.0.0.2"


def test_pods_that_have_ended_or_have_no_devices_are_left_out_by_name():
    found = parse([*TWO, pod("old", configuration(2), 1, phase="Failed"), pod("master", None)])
    assert len(found.hosts) == 2
    assert found.notes == (
        "pod old has ended (Failed): left out",
        "pod master has no Ascend devices and no rank index: left out",
    )


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            [pod("m-0", configuration(1), 0), pod("w-0", configuration(2), 0)],
            "pod m-0 and pod w-0 both have hccl/rankIndex 0",
        ),
        ([pod("m-0", configuration(1), 0), pod("w-0", configuration(2), 0)], "the tasks of a Volcano job"),
        ([pod("a", configuration(1), 0), pod("b", configuration(2))], "pod b has no hccl/rankIndex, others have"),
        ([pod("a", None, 0)], "pod a has hccl/rankIndex but no annotation"),
        ([pod("a", configuration(1), "x")], "pod a has hccl/rankIndex 'x'"),
        ([pod("a", {"server_id": "10.0.0.1", "devices": []})], "pod a has no server_id with devices"),
        ([pod("a", {"devices": [{"device_id": "0"}]})], "pod a has no server_id with devices"),
        (
            [pod("a", configuration(1, devices=()) | {"devices": [{"device_id": "x"}]})],
            "a device of pod a has device_id 'x'",
        ),
        ([pod("a", [1])], "the configuration of pod a is no object"),
        (
            [pod("a", configuration(1), 0), pod("b", configuration(2), 1), pod("c", configuration(1), 2)],
            "pod c and pod a are both on 10.0.0.1, with pods of other hosts between them",
        ),
        (
            [
                pod("a", configuration(1), 0, super_pod_id="0"),
                pod("b", configuration(1, devices=(7,)), 1, super_pod_id="1"),
            ],
            "in two super pods",
        ),
        ([], "no pod with Ascend devices is in it"),
        ([pod("master", None)], "no pod with Ascend devices is in it"),
        ([5], "a pod is an object, not int"),
        (["{"], "the configuration is not JSON: '{'"),
    ],
)
def test_pods_that_make_no_table_are_named(value, says):
    with pytest.raises(SourceError) as caught:
        parse(value)
    assert says in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"\xff", "byte 0xff is not UTF-8"), (b"a: 1\nb: c: d", "pods:2: it is neither JSON nor YAML"), (b"", "no pod")],
)
def test_a_text_that_is_neither_json_nor_yaml_is_refused(data, says):
    with pytest.raises(SourceError) as caught:
        parse_pods(data, "pods")
    assert says in str(caught.value)


VALUES = st.recursive(
    st.none() | st.integers(-1, 3) | st.sampled_from(["", "0", "{", "10.0.0.1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "items",
                    "metadata",
                    "annotations",
                    CONFIGURATION,
                    "hccl/rankIndex",
                    "status",
                    "devices",
                    "server_id",
                    "device_id",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=80)
@given(VALUES)
def test_any_value_is_pods_or_an_error_in_words(value):
    try:
        parse(value)
    except RankTableError as error:
        assert error.remedy
