"""The dialects with server lists beyond version 1.0: to the model and back, and what each cannot hold."""

import copy
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import (
    AmbiguousRankError,
    BuildError,
    Cluster,
    Device,
    Group,
    GroupNotFoundError,
    InvalidTableError,
    RankTable,
    RankTableError,
    Server,
    SuperPod,
    encode_table,
    parse_table,
)
from ranktable.profile import READERS, build_profile
from ranktable.reading.document import parse_document
from ranktable.tables import encode_document
from ranktable.validate import validate_document

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.text(max_size=5), children, max_size=2),
    max_leaves=4,
)
EXTRAS = st.dictionaries(st.text(max_size=5).map(lambda key: "x_" + key), JSON_VALUES, max_size=2)
TEXTS = st.text(max_size=5)
MAYBE_TEXT = st.none() | TEXTS
NUMBERS = st.integers(0, 10**10 - 1)
IDS = st.lists(TEXTS, min_size=1, max_size=3).map(tuple)


def some(values):
    return st.lists(values, min_size=1, max_size=3).map(tuple)


def servers(super_device_ids, extras=EXTRAS):
    devices = st.builds(Device, NUMBERS, NUMBERS, MAYBE_TEXT, super_device_ids, extra=EXTRAS)
    return st.builds(Server, TEXTS, some(devices), MAYBE_TEXT, MAYBE_TEXT, extra=extras)


PODS = some(st.builds(SuperPod, TEXTS, IDS, EXTRAS))
NO_PODS = st.just(())
NO_NUMBERS = st.none()


def tables(dialect, *, pods=NO_PODS, clusters=NO_PODS, super_device_ids=NO_NUMBERS, extra=EXTRAS):
    return st.builds(
        RankTable,
        st.just(dialect),
        some(servers(super_device_ids)),
        TEXTS,
        st.none() | NUMBERS,
        pods,
        clusters,
        extra=extra,
    )


COUNTED = st.builds(lambda rest, number: {**rest, "data_version": number}, EXTRAS, st.integers(0, 9))
SUPER = {"pods": NO_PODS | PODS, "super_device_ids": MAYBE_TEXT}
ANY_TABLE = st.one_of(
    tables("1.0"),
    tables("1.2", **SUPER),
    tables("volcano-job", **SUPER, extra=COUNTED),
    tables(
        "volcano-global", **SUPER, clusters=some(st.builds(Cluster, TEXTS, NO_PODS | IDS, IDS, EXTRAS)), extra=COUNTED
    ),
    tables("cross-cluster", clusters=some(st.builds(Cluster, TEXTS, IDS, NO_PODS | IDS, EXTRAS))),
)


@settings(deadline=None, max_examples=120)
@given(ANY_TABLE)
def test_a_table_of_any_dialect_survives_encoding_and_decoding(table):
    assert parse_table(encode_table(table)) == table


@st.composite
def services(draw):
    names = draw(st.lists(st.sampled_from(["0", "1", "2", "3", "x"]), min_size=1, max_size=3, unique=True))
    placed = []
    for name in names:
        if name in ("0", "1"):
            extras = st.just({}) | st.builds(lambda text: {"server_ip": text}, TEXTS)
            members = st.builds(Server, TEXTS, st.just(()), extra=extras)
        else:
            extras = st.builds(lambda text, rest: {**rest, "server_ip": text}, TEXTS, EXTRAS)
            members = servers(MAYBE_TEXT, extras)
        placed += [replace(server, group=name) for server in draw(st.lists(members, max_size=2))]
    groups = tuple(Group(name, draw(EXTRAS)) for name in names)
    version = draw(st.sampled_from([{}, {"version": "1.2"}]))
    return RankTable("mindie-global", tuple(placed), draw(TEXTS), groups=groups, extra={**version, **draw(EXTRAS)})


@settings(deadline=None, max_examples=60)
@given(services())
def test_a_service_with_groups_survives_encoding_and_decoding(table):
    assert parse_table(encode_table(table)) == table


def device(number, rank, **others):
    return {"device_id": str(number), "rank_id": str(rank), **others}


SUPER_POD_TABLE = {
    "version": "1.2",
    "server_count": "1",
    "server_list": [{"server_id": "a", "device": [device(0, 0, super_device_id="7", device_port="16666")]}],
    "super_pod_list": [{"super_pod_id": "0", "rack": 3, "server_list": [{"server_id": "a", "slot": [1]}]}],
    "status": "completed",
}
CLUSTER_TABLE = {
    "version": "1.0",
    "server_count": "1",
    "server_list": [
        {"server_id": "a", "server_ip": "10.0.0.1", "device": [device(0, 0, dpu_ip="1.2.3.4", numa_id="0")]}
    ],
    "cluster_list": [
        {"cluster_id": "c", "network_type": "ROCE", "az_id": "1", "region_id": "2", "server_list": [{"server_id": "a"}]}
    ],
    "status": "completed",
}
GLOBAL_TABLE = {
    **SUPER_POD_TABLE,
    "version": "1.4",
    "cluster_list": [{"cluster_id": "c", "super_pod_list": [{"super_pod_id": "0"}]}],
    "data_version": 4,
}
JOB_TABLE = {
    **SUPER_POD_TABLE,
    "version": "1.3",
    "server_list": [
        {"server_id": "a", "device": [device(0, 0, super_device_id="7", tor_ip="10.9.9.9", tor_port="eth1/1")]}
    ],
    "data_version": 2,
}
SERVICE_TABLE = {
    "version": "1.2",
    "status": "completed",
    "server_group_list": [
        {"group_id": "0", "server_count": "1", "server_list": [{"server_ip": "10.0.0.1"}]},
        {"group_id": "1", "server_count": "0", "server_list": []},
        {
            "group_id": "2",
            "deploy_server": "1",
            "server_count": "1",
            "server_list": [
                {
                    "server_id": "10.0.0.2",
                    "server_ip": "10.1.0.2",
                    "device": [device(4, 0, super_device_id="8", device_logical_id="0")],
                }
            ],
            "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "10.0.0.2"}]}],
        },
    ],
}
WHOLE = {
    "1.2": SUPER_POD_TABLE,
    "cross-cluster": CLUSTER_TABLE,
    "volcano-global": GLOBAL_TABLE,
    "volcano-job": JOB_TABLE,
    "mindie-global": SERVICE_TABLE,
}


@pytest.mark.parametrize("dialect", WHOLE)
def test_every_key_of_a_file_is_written_back(dialect):
    table = parse_table(json.dumps(WHOLE[dialect]))
    assert table.dialect == dialect
    assert json.loads(encode_table(table)) == WHOLE[dialect]


def test_super_pods_and_clusters_are_in_the_model():
    table = parse_table(json.dumps(GLOBAL_TABLE))
    assert [(pod.super_pod_id, pod.server_ids) for pod in table.super_pods] == [("0", ("a",))]
    assert [(cluster.cluster_id, cluster.super_pod_ids) for cluster in table.clusters] == [("c", ("0",))]
    assert table.device_of(0).super_device_id == "7"
    assert parse_table(json.dumps(CLUSTER_TABLE)).clusters[0].server_ids == ("a",)


def test_what_an_entry_of_a_super_pod_holds_leaves_with_it():
    table = parse_table(json.dumps(SUPER_POD_TABLE))
    emptied = replace(table, super_pods=(replace(table.super_pods[0], server_ids=("b",)),))
    assert encode_document(emptied)["super_pod_list"] == [
        {"super_pod_id": "0", "server_list": [{"server_id": "b"}], "rack": 3}
    ]


ODD_VALUES = st.recursive(
    st.sampled_from([None, True, 0, 7, -1, 1.5, "", "0", "7", "1.0", "*", "10.0.0.1", ",", "::1", "4294967296"]),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.sampled_from(["server_id", "x"]), children),
    max_leaves=3,
)
PROFILES = [build_profile(chip=chip, reader=reader) for chip in (None, "a3") for reader in (None, *READERS)]


def places_in(value, path=()):
    """Return the path of every member and item of a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [
        place for key, child in children for place in [(*path, key), *(places_in(child, (*path, key)) if child else ())]
    ]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_odd_values_anywhere_are_reported_and_never_raise(data):
    value = copy.deepcopy(WHOLE[data.draw(st.sampled_from(sorted(WHOLE)))])
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places_in(value) or [("version",)]))
        holder = value
        for step in path:
            holder = holder[step]
        if data.draw(st.booleans()):
            holder[last] = data.draw(ODD_VALUES)
        else:
            del holder[last]
    text = json.dumps(value)
    try:
        validate_document(parse_document(text.encode(), "t.json"), data.draw(st.sampled_from(PROFILES)))
        table = parse_table(text)
    except RankTableError:
        return
    assert parse_table(encode_table(table)) == table


ONE = (Server("a", (Device(0, 0),)),)


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (RankTable("1.0", ONE, super_pods=(SuperPod("0", ("a",)),)), "super pods"),
        (RankTable("1.0", (Server("a", (Device(0, 0, super_device_id="1"),)),)), "super device ids"),
        (RankTable("1.2", ONE, clusters=(Cluster("c", ("a",)),)), "clusters"),
        (RankTable("cross-cluster", ONE, groups=(Group("g"),)), "groups"),
        (RankTable("1.0", (replace(ONE[0], group="g"),)), "groups"),
        (RankTable("mindie-global", ONE, declared_server_count=1), "server count"),
        (RankTable("mindie-global", ONE, groups=(Group("2"),)), "is in none of the table's groups"),
    ],
)
def test_a_dialect_refuses_what_it_has_no_place_for(table, names):
    with pytest.raises(BuildError, match=names):
        encode_table(table)


def test_groups_with_one_id_cannot_be_told_apart():
    twice = {**SERVICE_TABLE, "server_group_list": [SERVICE_TABLE["server_group_list"][0]] * 2}
    with pytest.raises(InvalidTableError, match=r"the same group_id stands at server_group_list\[0\]\.group_id"):
        parse_table(json.dumps(twice))


def test_a_server_of_an_instance_has_a_server_id():
    servers = [{"server_ip": "10.0.0.1", "device": [device(0, 0)]}]
    group = {"group_id": "2", "server_count": "1", "server_list": servers}
    with pytest.raises(InvalidTableError, match=r"server_list\[0\]\.server_id: the key is missing"):
        parse_table(json.dumps({"version": "1.0", "status": "completed", "server_group_list": [group]}))


def two_instances():
    placed = tuple(
        Server(f"{name}{node}", (Device(0, node * 2), Device(1, node * 2 + 1)), group=name)
        for name in ("2", "3")
        for node in range(2)
    )
    return RankTable("mindie-global", placed, groups=(Group("2"), Group("3")))


def test_a_rank_that_several_groups_have_is_refused_and_asked_of_one_group():
    table = two_instances()
    assert table.world_size == 8
    with pytest.raises(AmbiguousRankError, match=r"rank 3 stands in group '2' and again in group '3'; .*of_group"):
        table.server_of(3)
    part = table.of_group("3")
    assert (part.world_size, part.groups) == (4, (Group("3"),))
    assert part.server_of(3).server_id == "31"
    assert part.servers_by_rank.index(part.server_of(3)) == 1


def test_a_rank_twice_in_one_group_and_a_group_that_is_not_there_are_refused():
    table = replace(
        two_instances(), groups=(Group("2"),), servers=(Server("a", (Device(0, 0), Device(1, 0)), group="2"),)
    )
    with pytest.raises(AmbiguousRankError, match="rank 0 stands twice in group '2'"):
        table.device_of(0)
    with pytest.raises(GroupNotFoundError, match="the table has no group '7'; its groups are '2'"):
        table.of_group("7")
