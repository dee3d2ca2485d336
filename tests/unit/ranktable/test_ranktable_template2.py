"""Template 2, cloud and lab: to the model and back, the ranks that the cloud form implies, what cannot be written."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import BuildError, Device, Group, InvalidTableError, RankTable, Server, encode_table, parse_table
from ranktable.tables import encode_document

EXTRAS = st.dictionaries(st.text(min_size=1).map(lambda key: "x_" + key), st.text() | st.integers(), max_size=2)
NAMES = st.text(min_size=1, max_size=5)
ADDRESSES = st.none() | st.ip_addresses().map(str)
NUMBERS = st.integers(0, 10**10 - 1)


@st.composite
def cloud_tables(draw):
    """Tables with ranks by server_id and device_id, whose pods stand in one piece in their server."""
    groups, servers = [], []
    for name in draw(st.lists(st.text(max_size=5), min_size=1, max_size=2, unique=True)):
        groups.append(Group(name, draw(EXTRAS)))
        for server_id in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
            pods = draw(st.lists(NAMES, min_size=1, max_size=2, unique=True))
            devices = [
                Device(draw(NUMBERS), -1, draw(ADDRESSES), extra={"pod_name": pod} | own | draw(EXTRAS))
                for pod in pods
                for own in [{"instance": {"x": pod}} if draw(st.booleans()) else {}]
                for _ in range(draw(st.integers(1, 3)))
            ]
            servers.append(Server(server_id, tuple(devices), group=name))
    return RankTable("template2-cloud", tuple(rank(servers)), groups=tuple(groups), extra=draw(EXTRAS))


def rank(servers):
    """Give the ranks that the cloud form implies, in a way of its own: one sorted list of everything."""
    listed = [
        (server.server_id, device.device_id, place, position)
        for place, server in enumerate(servers)
        for position, device in enumerate(server.devices)
    ]
    for place, server in enumerate(servers):
        devices = (
            replace(device, rank_id=sorted(listed).index((server.server_id, device.device_id, place, position)))
            for position, device in enumerate(server.devices)
        )
        yield replace(server, devices=tuple(devices))


@settings(max_examples=30)
@given(cloud_tables())
def test_a_cloud_table_survives_encoding_and_decoding(table):
    assert parse_table(encode_table(table)) == table


@settings(max_examples=30)
@given(cloud_tables())
def test_a_cloud_file_is_written_as_it_was_read(table):
    value = encode_document(table)
    assert encode_document(parse_table(json.dumps(value))) == value


LAB_DEVICES = st.builds(
    lambda device_id, rank_id, address, extra, own: Device(
        device_id, rank_id, address, extra=extra | ({"instance": own} if own else {})
    ),
    NUMBERS,
    NUMBERS,
    ADDRESSES,
    EXTRAS,
    EXTRAS,
)


@st.composite
def lab_tables(draw):
    groups, servers = [], []
    for name in draw(st.lists(st.text(max_size=5), min_size=1, max_size=2, unique=True)):
        groups.append(Group(name, draw(EXTRAS)))
        for server_id in draw(st.lists(st.text(max_size=5), min_size=1, max_size=3, unique=True)):
            devices = tuple(draw(st.lists(LAB_DEVICES, min_size=1, max_size=3)))
            servers.append(Server(server_id, devices, group=name))
    board = {"deploy_mode": "lab", "para_plane_nic_location": "device", "board_id": "0x0000"}
    return RankTable("template2-lab", tuple(servers), groups=tuple(groups), extra=board | draw(EXTRAS))


@settings(max_examples=30)
@given(lab_tables())
def test_a_lab_table_survives_encoding_and_decoding(table):
    assert parse_table(encode_table(table)) == table


@settings(max_examples=30)
@given(lab_tables())
def test_a_lab_file_is_written_as_it_was_read(table):
    value = encode_document(table)
    assert encode_document(parse_table(json.dumps(value))) == value


def instance(pod, server_id, *device_ids):
    return {"pod_name": pod, "server_id": server_id, "devices": [{"device_id": str(each)} for each in device_ids]}


def cloud(*instances, **changes):
    group = {
        "group_name": "hccl_world_group",
        "instance_count": str(len(instances)),
        "device_count": str(sum(len(each["devices"]) for each in instances)),
        "instance_list": list(instances),
    }
    return {"status": "completed", "group_count": "1", "group_list": [group | changes]}


def test_cloud_ranks_follow_server_ids_as_strings_then_device_ids():
    value = cloud(instance("p", "10.0.0.9", 1), instance("q", "10.0.0.10", 5, 2), instance("r", "10.0.0.9", 0))
    table = parse_table(json.dumps(value))
    ranks = {(server.server_id, device.device_id): device.rank_id for server, device in table.placements}
    assert ranks == {("10.0.0.10", 2): 0, ("10.0.0.10", 5): 1, ("10.0.0.9", 0): 2, ("10.0.0.9", 1): 3}


def test_pods_of_one_server_make_one_server_and_come_back_as_pods():
    value = cloud(instance("p", "a", 1), instance("q", "a", 0))
    table = parse_table(json.dumps(value))
    assert [device.extra["pod_name"] for device in table.servers[0].devices] == ["p", "q"]
    written = encode_document(table)["group_list"][0]["instance_list"]
    assert [(each["pod_name"], each["server_id"]) for each in written] == [("p", "a"), ("q", "a")]


def test_a_server_in_two_groups_is_ranked_once():
    groups = [
        cloud(instance(pod, "a", number), group_name=pod)["group_list"][0] for pod, number in (("p", 1), ("q", 0))
    ]
    table = parse_table(json.dumps({"status": "completed", "group_count": "2", "group_list": groups}))
    assert [(server.group, server.ranks) for server in table.servers] == [("p", (1,)), ("q", (0,))]


@pytest.mark.parametrize("key", ["instance_count", "device_count"])
def test_a_wrong_count_is_kept_until_somebody_corrects_it(key):
    value = cloud(instance("p", "a", 0), **{key: "7"})
    assert encode_document(parse_table(json.dumps(value))) == value


def test_ranks_that_the_order_does_not_imply_are_not_written():
    table = parse_table(json.dumps(cloud(instance("p", "a", 0), instance("q", "b", 0))))
    first, second = table.servers
    swapped = (
        replace(first, devices=(replace(first.devices[0], rank_id=1),)),
        replace(second, devices=(replace(second.devices[0], rank_id=0),)),
    )
    with pytest.raises(BuildError, match=r"device 0 of server 'a' has rank 1; .* makes it 0; renumber the ranks"):
        encode_table(replace(table, servers=swapped))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group": None}, "server 'a' is in none of the table's groups"),
        ({"group": "other"}, "server 'a' is in none of the table's groups"),
        ({"host_ip": "10.0.0.1", "extra": {"container_ip": "1.1.1.1"}}, "server 'a' has host_ip, container_ip"),
        ({"devices": (Device(0, 0),)}, "device 0 of server 'a' has no pod_name"),
        ({"devices": (Device(0, 0, super_device_id="1"),)}, "server 'a' has super_device_id"),
    ],
)
def test_what_the_cloud_form_has_no_key_for_is_not_written(change, says):
    table = parse_table(json.dumps(cloud(instance("p", "a", 0))))
    with pytest.raises(BuildError, match=says):
        encode_table(replace(table, servers=(replace(table.servers[0], **change),)))


def test_a_pod_name_inside_a_device_is_refused_not_lost():
    value = cloud(instance("p", "a", 0))
    value["group_list"][0]["instance_list"][0]["devices"][0]["pod_name"] = "q"
    with pytest.raises(InvalidTableError, match="belongs to the instance"):
        parse_table(json.dumps(value))


def test_an_empty_address_is_written_where_hccl_wants_the_key():
    value = cloud(instance("p", "a", 0), instance("q", "b", 0))
    for each in value["group_list"][0]["instance_list"]:
        each["devices"][0]["device_ip"] = ""
    table = parse_table(json.dumps(value))
    assert [device.device_ip for _, device in table.placements] == [None, None]
    assert encode_document(table) == value
    single = cloud(instance("p", "a", 0))
    assert encode_document(parse_table(json.dumps(single))) == single
