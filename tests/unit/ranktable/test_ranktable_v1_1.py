"""Version 1.1, online and offline: to the model and back, and the limits of rule R33."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import BuildError, Device, Group, RankTable, Server, encode_table, parse_table
from ranktable.profile import build_profile
from ranktable.reading.document import parse_document
from ranktable.tables import encode_document
from ranktable.validate import validate_document

EXTRAS = st.dictionaries(st.text(min_size=1).map(lambda key: "x_" + key), st.text() | st.integers(), max_size=2)
NUMBERS = st.integers(0, 10**10 - 1)
DEVICES = st.builds(
    Device,
    st.integers(-1, 10**10 - 1),
    NUMBERS,
    st.none() | st.ip_addresses().map(str),
    st.none() | NUMBERS.map(str),
    extra=EXTRAS,
)
OFFLINE_DEVICES = st.builds(Device, st.integers(-1, 99), NUMBERS, st.none() | st.ip_addresses().map(str), extra=EXTRAS)


def tables(dialect, devices, needed):
    servers = st.builds(Server, st.text(), st.lists(devices, min_size=1, max_size=3).map(tuple), extra=EXTRAS)
    return st.builds(
        RankTable,
        st.just(dialect),
        st.lists(servers, min_size=1, max_size=3).map(tuple),
        st.text(),
        extra=EXTRAS.map(lambda extra: needed | extra),
    )


@pytest.mark.parametrize(
    ("dialect", "devices", "needed"),
    [
        ("1.1", DEVICES, {"collective_id": "w"}),
        ("1.1", DEVICES, {"collective_id": "w", "heterog_sub_version": "1.2"}),
        ("1.1-offline", OFFLINE_DEVICES, {}),
    ],
)
def test_a_table_survives_both_ways(dialect, devices, needed):
    @settings(max_examples=20)
    @given(tables(dialect, devices, needed))
    def check(table):
        value = encode_document(table)
        assert parse_table(json.dumps(value)) == table
        assert encode_document(parse_table(encode_table(table))) == value

    check()


def rank(number, device_id="-1", **members):
    return {
        "rank_id": str(number),
        "device_id": device_id,
        "rank_ip": f"10.0.0.{number + 1}",
        "port": "16700",
    } | members


def good():
    nodes = [
        {"node_addr": "10.0.0.1", "ranks": [rank(0), rank(1, "0"), rank(2, "1")]},
        {"node_addr": "10.0.0.9", "ranks": [rank(3), rank(4, "0")]},
    ]
    return {"version": "1.1", "status": "completed", "collective_id": "w", "mode": "tcp", "node_list": nodes}


def findings(value):
    text = json.dumps(value).encode()
    report = validate_document(parse_document(text, "t.json"), build_profile())
    return [(problem.rule, problem.severity, problem.path) for problem in report.problems]


def change(path, value):
    changed = copy.deepcopy(good())
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    if value is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return changed


def test_a_good_table_has_no_finding():
    assert findings(good()) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("collective_id",), "w" * 127),
        (("mode",), "rdma"),
        (("mode",), None),
        (("node_list", 0, "ranks", 0, "port"), "65535"),
        (("node_list", 0, "ranks", 0, "port"), "0"),
    ],
)
def test_what_is_just_allowed_has_no_finding(path, value):
    assert findings(change(path, value)) == []


def test_a_port_that_there_is_not_is_not_compared_with_others():
    table = change(("node_list", 0, "ranks", 0, "rank_ip"), "10.0.0.2")
    for place in (0, 1):
        table["node_list"][0]["ranks"][place]["port"] = "65536"
    assert findings(table) == [("R33", "error", f"node_list[0].ranks[{place}].port") for place in (0, 1)]


def test_a_rank_on_the_host_has_device_minus_one():
    table = parse_table(json.dumps(change(("node_list", 0, "ranks", 0, "device_id"), None)))
    assert [device.device_id for device in table.servers[0].devices] == [-1, 0, 1]
    assert encode_document(table)["node_list"][0]["ranks"][0]["device_id"] == "-1"


FIRST = "node_list[0].ranks[0]"
BROKEN = [
    (("version",), "1.0", ("R2", "error", "version")),
    (("status",), None, ("R5", "error", "status")),
    (("status",), "unknown", ("R3", "error", "status")),
    (("collective_id",), "w" * 128, ("R33", "error", "collective_id")),
    (("mode",), "udp", ("R33", "error", "mode")),
    (("node_list", 0, "node_addr"), "host-a", ("R33", "error", "node_list[0].node_addr")),
    (("node_list", 0, "node_addr"), "10.0.0.9", ("R7", "error", "node_list[1].node_addr")),
    (("node_list", 0, "node_addr"), "10.*.*.*", ("R7", "error", "node_list[0].node_addr")),
    (("node_list", 0, "ranks", 0, "rank_id"), "1", ("R9", "error", "node_list[0].ranks[1].rank_id")),
    (("node_list", 0, "ranks", 0, "rank_id"), 0, ("R4", "error", f"{FIRST}.rank_id")),
    (("node_list", 0, "ranks", 0, "device_id"), "host", ("R8", "error", f"{FIRST}.device_id")),
    (("node_list", 0, "ranks", 0, "device_id"), "-2", ("R8", "error", f"{FIRST}.device_id")),
    (("node_list", 0, "ranks", 0, "device_id"), "07", ("R8", "error", f"{FIRST}.device_id")),
    (("node_list", 0, "ranks", 2, "device_id"), "0", ("R8", "error", "node_list[0].ranks[2].device_id")),
    (("node_list", 0, "ranks", 0, "rank_ip"), "-.-.-.-", ("R13", "error", f"{FIRST}.rank_ip")),
    (("node_list", 0, "ranks", 0, "rank_ip"), "fe80::1", ("R15", "error", f"{FIRST}.rank_ip")),
    (("node_list", 0, "ranks", 0, "rank_ip"), "10.0.0.2", ("R33", "warning", "node_list[0].ranks[1].port")),
    (("node_list", 0, "ranks", 0, "port"), "65536", ("R33", "error", f"{FIRST}.port")),
    (("node_list", 0, "rank"), [], ("R31", "warning", "node_list[0].rank")),
]


@pytest.mark.parametrize(("path", "value", "expected"), BROKEN, ids=[str(n) for n in range(len(BROKEN))])
def test_a_broken_rule_is_found_at_the_key_of_this_version(path, value, expected):
    found = findings(change(path, value))
    assert expected in found
    assert {entry[0] for entry in found} <= {expected[0], "R33"}


def test_an_empty_rank_ip_and_port_0_stand_for_the_defaults():
    table = change(("node_list", 0, "ranks", 0), rank(0, rank_ip="", port="0"))
    table["node_list"][0]["ranks"][1] |= {"rank_ip": "", "port": "0"}
    assert findings(table) == []


def test_ranks_without_an_address_share_that_of_their_node_and_no_other():
    table = good()
    for node in table["node_list"]:
        del node["ranks"][0]["rank_ip"]
    assert findings(table) == []
    del table["node_list"][0]["ranks"][1]["rank_ip"]
    assert findings(table) == [("R33", "warning", "node_list[0].ranks[1].port")]
    table["node_list"][0]["ranks"][1]["rank_ip"] = "10.0.0.1"
    assert findings(table) == [("R33", "warning", "node_list[0].ranks[1].port")]


def test_a_sub_version_demands_all_keys_of_a_rank():
    table = good() | {"heterog_sub_version": "1.2"}
    for node in table["node_list"]:
        for each in node["ranks"]:
            each["sdid"] = "0"
            each["bind_device_id"] = "0"
    table["node_list"][0]["ranks"][0] |= {"rank_ip": "", "port": "0"}
    assert findings(table) == []
    del table["node_list"][0]["ranks"][0]["bind_device_id"]
    del table["node_list"][0]["ranks"][1]["bind_device_id"]
    del table["node_list"][0]["ranks"][1]["rank_ip"]
    assert findings(table) == [
        ("R33", "error", f"{FIRST}.bind_device_id"),
        ("R33", "error", "node_list[0].ranks[1].rank_ip"),
    ]
    assert ("R33", "error", "heterog_sub_version") in findings(table | {"heterog_sub_version": "1.3"})


def test_offline_nodes_have_equal_numbers_of_devices():
    def node(name, *items, first=0):
        ranks = [{"rank_id": str(first + place), "item_id": item} for place, item in enumerate(items)]
        return {"node_id": name, "rank_list": ranks}

    table = {"version": "1.1", "status": "completed", "node_list": [node("a", "-1", "0"), node("b", "0", first=2)]}
    assert findings(table) == []
    table["node_list"][1] = node("b", "-1", first=2)
    assert findings(table) == [("R33", "error", "node_list[1].rank_list")]


def test_a_file_larger_than_10_kib_is_refused_for_this_version_only():
    large = good() | {"x": "y" * 10240}
    assert ("R1", "error", "") in findings(large)
    assert ("R1", "error", "") not in findings({"version": "1.0", "server_list": [], "x": "y" * 10240})


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (RankTable("1.1", (), groups=(Group("g"),)), "a table with groups"),
        (RankTable("1.1", (Server("a", (Device(0, 0),), host_ip="10.0.0.1"),)), "a table with a host_ip"),
    ],
)
def test_what_this_version_has_no_key_for_is_not_written(table, says):
    with pytest.raises(BuildError, match=says):
        encode_table(table)


def test_an_empty_rank_ip_is_written_back():
    value = change(("node_list", 0, "ranks", 0), rank(0, rank_ip=""))
    again = json.loads(encode_table(parse_table(json.dumps(value))))
    assert again["node_list"][0]["ranks"][0]["rank_ip"] == ""
