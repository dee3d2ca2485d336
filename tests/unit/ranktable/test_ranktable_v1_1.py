"""Version 1.1, online and offline: to the model and back, and the limits of rule R33."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import BuildError, Device, Group, RankTable, Server, encode_table, parse_table
from ranktable.tables import encode_document

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


def test_a_rank_on_the_host_has_device_minus_one():
    table = parse_table(json.dumps(change(("node_list", 0, "ranks", 0, "device_id"), None)))
    assert [device.device_id for device in table.servers[0].devices] == [-1, 0, 1]
    assert encode_document(table)["node_list"][0]["ranks"][0]["device_id"] == "-1"


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
