"""A table of any dialect is read back as it was written, and a file is written as it was read."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import Cluster, Device, Group, RankTable, Server, SuperPod, encode_table, parse_table
from ranktable.tables import encode_document
from ranktable.values import render_json

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.text(max_size=5), children, max_size=2),
    max_leaves=4,
)
EXTRAS = st.dictionaries(st.text(max_size=5).map(lambda key: "x_" + key), JSON_VALUES, max_size=2)
TEXTS = st.text(max_size=5)
NAMES = st.text(min_size=1, max_size=5)
NUMBERS = st.integers(0, 10**10 - 1)
OF_32_BITS = st.integers(0, 2**32 - 1)
ADDRESSES = st.none() | st.ip_addresses().map(str)
NOTHING = st.just(())


def some(values, most=3, **options):
    return st.lists(values, min_size=1, max_size=most, **options).map(tuple)


def with_keys(**keys):
    return EXTRAS.map(lambda extra: keys | extra)


def devices(ids=NUMBERS, address=ADDRESSES, super_id=st.none(), extra=EXTRAS):  # noqa: B008
    return some(st.builds(Device, ids, NUMBERS, address, super_id, extra=extra))


def servers(listed, hosts=st.none() | TEXTS, extra=EXTRAS):  # noqa: B008
    return some(st.builds(Server, TEXTS, listed, hosts, hosts, extra=extra))


IDS = some(TEXTS)
PODS = some(st.builds(SuperPod, TEXTS, IDS, EXTRAS))
SUPER = servers(devices(address=st.none() | TEXTS, super_id=st.none() | TEXTS))
COUNTED = st.builds(lambda rest, number: {**rest, "data_version": number}, EXTRAS, st.integers(0, 9))


def flat(name, listed, pods=NOTHING, clusters=NOTHING, extra=EXTRAS):
    return st.builds(RankTable, st.just(name), listed, TEXTS, st.none() | NUMBERS, pods, clusters, extra=extra)


def of_version_1_1(name, listed, **keys):
    return st.builds(RankTable, st.just(name), servers(listed, st.none()), TEXTS, extra=with_keys(**keys))


@st.composite
def version_2(draw):
    ports = st.lists(TEXTS, max_size=2)
    address = st.fixed_dictionaries(
        {"addr_type": TEXTS, "addr": TEXTS, "ports": ports}, optional={"plane_id": TEXTS, "backup_addr": ports}
    )
    placed = []
    for server_id in draw(some(TEXTS, unique=True)):
        held = []
        for _ in range(draw(st.integers(1, 2))):
            layers = draw(some(st.integers(0, 9), unique=True))
            levels = [
                {
                    "net_layer": layer,
                    "net_instance_id": server_id if layer == min(layers) else draw(TEXTS),
                    "rank_addr_list": draw(st.lists(address, max_size=1)),
                }
                for layer in layers
            ]
            control = {"control_plane": {"addr_type": "", "addr": draw(TEXTS), "listen_port": draw(OF_32_BITS)}}
            extra = {"local_id": draw(OF_32_BITS), "level_list": levels} | draw(st.sampled_from([{}, control]))
            held.append(Device(draw(OF_32_BITS), draw(OF_32_BITS), extra=extra | draw(EXTRAS)))
        placed.append(Server(server_id, tuple(held)))
    return RankTable("2.0", tuple(placed), draw(TEXTS), extra=draw(EXTRAS))


@st.composite
def services(draw):
    placed, names = [], draw(some(st.sampled_from(["0", "1", "2", "3", "x"]), unique=True))
    for name in names:
        if name in ("0", "1"):
            members = st.builds(Server, TEXTS, NOTHING, extra=st.just({}) | st.builds(dict, server_ip=TEXTS))
        else:
            own = st.builds(lambda text, rest: {**rest, "server_ip": text}, TEXTS, EXTRAS)
            members = st.builds(Server, TEXTS, devices(super_id=st.none() | TEXTS), extra=own)
        placed += [replace(server, group=name) for server in draw(st.lists(members, max_size=2))]
    groups = tuple(Group(name, draw(EXTRAS)) for name in names)
    version = draw(st.sampled_from([{}, {"version": "1.2"}]))
    return RankTable("mindie-global", tuple(placed), draw(TEXTS), groups=groups, extra={**version, **draw(EXTRAS)})


@st.composite
def grouped(draw, name):
    """Template 2: a cloud file has no ranks, they follow server_id and device_id, and pods stand in one piece."""
    groups, placed, is_cloud = [], [], name == "template2-cloud"
    for group in draw(some(TEXTS, 2, unique=True)):
        groups.append(Group(group, draw(EXTRAS)))
        for server_id in draw(some(NAMES, unique=True)):
            pods = draw(some(NAMES, 2, unique=True)) if is_cloud else [None]
            held = ()
            for pod in pods:
                own = ({"pod_name": pod} if is_cloud else {}) | draw(st.sampled_from([{}, {"instance": {"x": pod}}]))
                held += draw(devices(extra=with_keys(**own)))
            placed.append(Server(server_id, held, group=group))
    if is_cloud:
        placed = ranked(placed)
    board = {} if is_cloud else {"deploy_mode": "lab", "para_plane_nic_location": "device", "board_id": "0x0000"}
    return RankTable(name, tuple(placed), groups=tuple(groups), extra=board | draw(EXTRAS))


def ranked(placed):
    """Give the ranks that the cloud form implies, in a way of its own: one sorted list of everything."""
    order = sorted(
        (server.server_id, device.device_id, place, position)
        for place, server in enumerate(placed)
        for position, device in enumerate(server.devices)
    )
    ranks = {(place, position): rank for rank, (_, _, place, position) in enumerate(order)}
    return [
        replace(server, devices=tuple(replace(each, rank_id=ranks[n, m]) for m, each in enumerate(server.devices)))
        for n, server in enumerate(placed)
    ]


HETEROGENEOUS = devices(st.integers(-1, 10**10 - 1), super_id=st.none() | NUMBERS.map(str))
TABLES = {
    "1.0": flat("1.0", servers(devices(address=st.none() | TEXTS))),
    "1.2": flat("1.2", SUPER, NOTHING | PODS),
    "volcano-job": flat("volcano-job", SUPER, NOTHING | PODS, extra=COUNTED),
    "volcano-global": flat(
        "volcano-global", SUPER, NOTHING | PODS, some(st.builds(Cluster, TEXTS, NOTHING | IDS, IDS, EXTRAS)), COUNTED
    ),
    "cross-cluster": flat(
        "cross-cluster", servers(devices()), clusters=some(st.builds(Cluster, TEXTS, IDS, NOTHING | IDS, EXTRAS))
    ),
    "1.1": of_version_1_1("1.1", HETEROGENEOUS, collective_id="w"),
    "1.1 with a sub version": of_version_1_1("1.1", HETEROGENEOUS, collective_id="w", heterog_sub_version="1.2"),
    "1.1-offline": of_version_1_1("1.1-offline", devices(st.integers(-1, 99))),
    "2.0": version_2(),
    "mindie-global": services(),
    "template2-cloud": grouped("template2-cloud"),
    "template2-lab": grouped("template2-lab"),
}


@pytest.mark.parametrize("dialect", TABLES)
def test_a_table_survives_both_ways(dialect):
    @settings(deadline=None, max_examples=40)
    @given(TABLES[dialect])
    def check(table):
        value = encode_document(table)
        assert parse_table(json.dumps(value)) == table
        assert encode_document(parse_table(encode_table(table))) == value

    check()


@given(st.dictionaries(st.text(), JSON_VALUES))
def test_the_layout_does_not_change_the_value(value):
    assert json.loads(render_json(value)) == value
