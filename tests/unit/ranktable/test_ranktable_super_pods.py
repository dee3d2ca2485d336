"""The rules of super pods, clusters and the network plan, each shown by the smallest change that breaks it."""

import copy
import json

import pytest

from ranktable import RankTableError
from ranktable.profile import build_profile
from ranktable.reading.document import parse_document
from ranktable.rules.super_pods import Sdid, parse_sdid
from ranktable.validate import validate_document


def sdid(server, device_id):
    """Return the super device id of a device of an A3 server."""
    return str(server << 22 | device_id // 2 << 18 | device_id % 2 << 16 | device_id)


def good_table(num_servers=4, per_pod=2, num_devices=4):
    """Return a table of super pods without a finding."""
    ids = [f"10.0.0.{server + 1}" for server in range(num_servers)]
    return {
        "version": "1.2",
        "server_count": str(num_servers),
        "server_list": [
            {
                "server_id": server_id,
                "device": [
                    {
                        "device_id": str(number),
                        "super_device_id": sdid(server % per_pod, number),
                        "device_ip": f"192.168.{server}.{number + 1}",
                        "rank_id": str(server * num_devices + number),
                    }
                    for number in range(num_devices)
                ],
            }
            for server, server_id in enumerate(ids)
        ],
        "super_pod_list": [
            {"super_pod_id": str(pod), "server_list": [{"server_id": name} for name in ids[first : first + per_pod]]}
            for pod, first in enumerate(range(0, num_servers, per_pod))
        ],
        "status": "completed",
    }


def findings(value, **options):
    document = parse_document(json.dumps(value).encode(), "t.json")
    report = validate_document(document, build_profile(**options))
    return [(problem.rule, problem.severity, problem.path) for problem in report.problems]


def change(value, *places):
    """Return the table with members replaced, or removed where the new value is None."""
    changed = copy.deepcopy(value)
    for path, member in places:
        holder = changed
        for step in path[:-1]:
            holder = holder[step]
        if member is None:
            del holder[path[-1]]
        else:
            holder[path[-1]] = member
    return changed


def number_of(device, server=0):
    return ("server_list", server, "device", device, "super_device_id")


def at(device, server=0):
    return f"server_list[{server}].device[{device}].super_device_id"


def pod(index, *rest):
    return ("super_pod_list", index, *rest)


THIRD = "server_list[2].server_id"
BROKEN = [
    (number_of(1), None, [("R24", "error", at(1))]),
    (number_of(1), "", [("R24", "error", at(1))]),
    (number_of(1), "0x7", [("R24", "error", at(1))]),
    (number_of(1), "4294967296", [("R24", "error", at(1))]),
    (number_of(1), 7, [("R4", "error", at(1))]),
    (number_of(1), sdid(0, 0), [("R24", "error", at(1))]),
    (number_of(1), "1", []),
    (number_of(1), sdid(0, 9), [("P3", "warning", at(1))]),
    (number_of(1), sdid(3, 1), [("P3", "warning", "server_list[0].device")]),
    (pod(1, "super_pod_id"), "0", [("R25", "error", "super_pod_list[1].super_pod_id")]),
    (pod(1, "super_pod_id"), "", [("R25", "error", "super_pod_list[1].super_pod_id")]),
    (pod(1, "super_pod_id"), "p" * 127, []),
    (pod(1, "super_pod_id"), "p" * 128, [("R25", "error", "super_pod_list[1].super_pod_id")]),
    (pod(1, "super_pod_id"), None, [("R5", "error", "super_pod_list[1].super_pod_id")]),
    (pod(1, "super_pod_id"), 1, [("R4", "error", "super_pod_list[1].super_pod_id")]),
    (pod(1, "serverList"), [], [("R31", "warning", "super_pod_list[1].serverList")]),
    (
        pod(1, "server_list", 0, "server_id"),
        "10.0.0.9",
        [("R25", "error", THIRD), ("R25", "error", "super_pod_list[1].server_list[0].server_id")],
    ),
    (pod(1, "server_list", 0), None, [("R25", "error", THIRD)]),
    (pod(1, "server_list"), [], [("R5", "error", "super_pod_list[1].server_list")]),
    (pod(1, "server_list", 0, "server_id"), None, [("R5", "error", "super_pod_list[1].server_list[0].server_id")]),
    (("super_pod_list",), [], [("R5", "error", "super_pod_list")]),
    (("super_pod_list",), None, [("R25", "warning", "super_pod_list")]),
    (("version",), None, [("R2", "error", "version")]),
]


@pytest.mark.parametrize(("path", "value", "expected"), BROKEN)
def test_a_broken_rule_of_super_pods_is_found_where_it_is_broken(path, value, expected):
    found = findings(change(good_table(), (path, value)))
    assert set(expected) <= set(found)
    assert bool(expected) == bool(found)
    if expected and expected[0][0] in ("R24", "P3"):
        assert found == expected


def test_a_good_super_pod_table_has_no_finding():
    assert findings(good_table()) == findings(good_table(), chip="a3") == findings(good_table(), reader="hccl") == []


def test_one_super_device_id_may_stand_in_two_pods_but_not_twice_in_one():
    assert sdid(0, 0) == good_table()["server_list"][2]["device"][0]["super_device_id"]
    table = change(good_table(), (number_of(0, 1), sdid(0, 0)))
    assert ("R24", "error", at(0, 1)) in findings(table)


def test_a_server_in_two_pods_is_found_at_its_second_place():
    table = good_table()
    table["super_pod_list"][1]["server_list"].append({"server_id": "10.0.0.1"})
    assert findings(table) == [("R25", "error", "super_pod_list[1].server_list[2].server_id")]


def test_servers_of_one_pod_that_do_not_stand_together_are_a_warning():
    table = good_table()
    pods = table["super_pod_list"]
    pods[0]["server_list"][1], pods[1]["server_list"][0] = pods[1]["server_list"][0], pods[0]["server_list"][1]
    for server in range(4):
        for number in range(4):
            table["server_list"][server]["device"][number]["super_device_id"] = sdid(server, number)
    assert findings(table) == [
        ("R26", "warning", "server_list[2].server_id"),
        ("R26", "warning", "server_list[3].server_id"),
    ]


def without_addresses(table):
    for server in table["server_list"]:
        for entry in server["device"]:
            del entry["device_ip"]
    return table


@pytest.mark.parametrize(
    ("version", "num_servers", "per_pod", "chip", "severity"),
    [
        ("1.2", 2, 2, None, None),
        ("1.2", 2, 2, "a3", None),
        ("1.2", 2, 1, None, "error"),
        ("1.2", 2, 1, "a3", "error"),
        ("1.2", 1, 1, None, None),
        ("1.0", 2, 2, "a3", "error"),
        ("1.0", 1, 1, "a3", None),
        ("1.0", 1, 1, "a2", None),
        ("1.0", 2, 2, "a2", "error"),
        ("1.0", 1, 1, "910a", "error"),
        ("1.0", 1, 1, "300i-duo", "error"),
        ("1.0", 1, 1, None, "warning"),
        ("1.0", 2, 2, None, "error"),
    ],
)
def test_addresses_are_demanded_by_chip_and_super_pod(version, num_servers, per_pod, chip, severity):
    table = {**without_addresses(good_table(num_servers, per_pod)), "version": version}
    found = {weight for rule, weight, _ in findings(table, chip=chip) if rule == "R16"}
    assert found == ({severity} if severity else set())


def test_rules_of_910a_do_not_hold_for_super_pods():
    assert findings(good_table(2, 2, 3)) == []
    uneven = good_table(2, 2, 4)
    del uneven["server_list"][1]["device"][3]
    assert findings(uneven) == []


@pytest.mark.parametrize(
    ("count", "chip", "severities"),
    [
        (8, "a2", set()),
        (9, "a2", {"warning"}),
        (16, "a2", {"warning"}),
        (17, "a2", {"error"}),
        (16, "a3", set()),
        (17, "a3", {"error"}),
    ],
)
def test_a_chip_has_a_usual_and_a_highest_number_of_devices(count, chip, severities):
    table = {**good_table(1, 1, count), "version": "1.0"}
    assert {severity for rule, severity, _ in findings(table, chip=chip) if rule == "R21"} == severities


@pytest.mark.parametrize(
    ("number", "parts"),
    [
        (37748736, Sdid(9, 0, 0, 0)),
        (38600711, Sdid(9, 3, 1, 7)),
        (100663296, Sdid(24, 0, 0, 0)),
        (102563855, Sdid(24, 7, 1, 15)),
        (117440512, Sdid(28, 0, 0, 0)),
        (119341071, Sdid(28, 7, 1, 15)),
        (0, None),
        (7, None),
        (48 << 22, None),
        (9 << 22 | 1, None),
        (2**32 - 1, None),
    ],
)
def test_public_super_device_ids_have_the_layout_and_counts_have_not(number, parts):
    assert parse_sdid(number) == parts


def cluster_table():
    """Return a table of two clusters without a finding."""
    table = good_table()
    del table["super_pod_list"]
    table["version"] = "1.0"
    for server in table["server_list"]:
        for entry in server["device"]:
            del entry["super_device_id"]
    members = [[{"server_id": f"10.0.0.{n}"} for n in pair] for pair in ((1, 2), (3, 4))]
    table["cluster_list"] = [{"cluster_id": str(n), "server_list": pair} for n, pair in enumerate(members)]
    return table


CLUSTERS = [
    (("cluster_list", 1, "cluster_id"), "0", ["cluster_list[1].cluster_id"]),
    (("cluster_list", 1, "server_list", 0), None, ["server_list[2].server_id"]),
    (
        ("cluster_list", 1, "server_list", 0, "server_id"),
        "10.0.0.1",
        ["server_list[2].server_id", "cluster_list[1].server_list[0].server_id"],
    ),
    (
        ("cluster_list", 1, "server_list", 0, "server_id"),
        "x",
        ["server_list[2].server_id", "cluster_list[1].server_list[0].server_id"],
    ),
]


@pytest.mark.parametrize(("path", "value", "places"), CLUSTERS)
def test_clusters_cover_every_server_once(path, value, places):
    good = cluster_table()
    assert findings(good, chip="a2") == findings(good, chip="a2", reader="mindspore") == []
    assert findings(change(good, (path, value)), chip="a2") == [("P4", "error", place) for place in places]


def test_clusters_of_super_pods_cover_every_pod_once():
    pods = [[{"super_pod_id": "0"}], [{"super_pod_id": "1"}]]
    clusters = [{"cluster_id": str(n), "super_pod_list": pod} for n, pod in enumerate(pods)]
    table = {**good_table(), "version": "1.4", "data_version": 1, "cluster_list": clusters}
    assert findings(table) == [("P1", "warning", "version")]
    pods[1][0]["super_pod_id"] = "0"
    assert findings(table)[1:] == [
        ("P4", "error", "super_pod_list[1].super_pod_id"),
        ("P4", "error", "cluster_list[1].super_pod_list[0].super_pod_id"),
    ]


def plan_table(address):
    """Return two servers of eight devices whose addresses are `address(server, device)`."""
    table = {**good_table(2, 2, 8), "version": "1.0"}
    del table["super_pod_list"]
    for server, entry in enumerate(table["server_list"]):
        for number, device in enumerate(entry["device"]):
            del device["super_device_id"]
            device["device_ip"] = address(server, number)
    return table


def four_segments(server, number):
    return f"192.{number % 4 + 1}.27.{10 + 2 * server + number // 4}"


def one_segment(server, number):
    return f"192.1.27.{10 + 8 * server + number}"


def segment_per_server(server, number):
    return f"192.1.{server}.{number + 1}"


@pytest.mark.parametrize(
    ("address", "chip", "count"),
    [
        (four_segments, "910a", 0),
        (four_segments, "a2", 12),
        (four_segments, None, 0),
        (one_segment, "a2", 0),
        (one_segment, "910a", 0),
        (segment_per_server, None, 8),
        (segment_per_server, "a3", 8),
        (lambda server, number: f"fd00::{number}:{server}", None, 0),
    ],
)
def test_the_network_plan_is_checked_when_a_prefix_is_given(address, chip, count):
    table = plan_table(address)
    assert [found for found in findings(table, chip=chip) if found[0] == "R23"] == []
    found = [(rule, severity) for rule, severity, _ in findings(table, chip=chip, network_plan=24) if rule == "R23"]
    assert found == [("R23", "warning")] * count


def test_odd_values_in_the_lists_are_reported_and_never_raise():
    for odd in (None, 3, "x", [], {}, [None], [{"server_id": 3}], [{"super_pod_id": [], "server_list": {}}]):
        for version, key in (("1.2", "super_pod_list"), ("1.4", "cluster_list"), ("1.0", "cluster_list")):
            try:
                findings({**good_table(), "version": version, key: odd})
                findings({"version": "1.0", "status": "completed", "server_group_list": odd})
            except RankTableError as error:
                assert "not a" in str(error)
