"""The rules of super pods, each shown by the smallest change to a good table that breaks it."""

import pytest
from rank_tables import change, findings, sdid, super_pod_table

from ranktable import RankTableError
from ranktable.rules.super_pods import Sdid, parse_sdid


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
    (pod(1, "super_pod_id"), "<pod id>", [("R25", "error", "super_pod_list[1].super_pod_id")]),
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
    found = findings(change(super_pod_table(), (path, value)))
    assert set(expected) <= set(found)
    assert bool(expected) == bool(found)
    if expected and expected[0][0] in ("R24", "P3"):
        assert found == expected


def test_a_good_super_pod_table_has_no_finding():
    assert (
        findings(super_pod_table())
        == findings(super_pod_table(), chip="a3")
        == findings(super_pod_table(), reader="hccl")
        == []
    )


def test_one_super_device_id_may_stand_in_two_pods_but_not_twice_in_one():
    assert sdid(0, 0) == super_pod_table()["server_list"][2]["device"][0]["super_device_id"]
    table = change(super_pod_table(), (number_of(0, 1), sdid(0, 0)))
    assert ("R24", "error", at(0, 1)) in findings(table)


def test_a_server_in_two_pods_is_found_at_its_second_place():
    table = super_pod_table()
    table["super_pod_list"][1]["server_list"].append({"server_id": "10.0.0.1"})
    assert findings(table) == [("R25", "error", "super_pod_list[1].server_list[2].server_id")]


def test_servers_of_one_pod_that_do_not_stand_together_are_a_warning():
    table = super_pod_table()
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
    table = {**without_addresses(super_pod_table(num_servers, per_pod)), "version": version}
    found = {weight for rule, weight, _ in findings(table, chip=chip) if rule == "R16"}
    assert found == ({severity} if severity else set())


def test_rules_of_910a_do_not_hold_for_super_pods():
    assert findings(super_pod_table(2, 2, 3)) == []
    uneven = super_pod_table(2, 2, 4)
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
    table = {**super_pod_table(1, 1, count), "version": "1.0"}
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


def test_a_job_of_volcano_with_super_pods_is_for_a3():
    table = without_addresses({**super_pod_table(2), "version": "1.3", "data_version": 1})
    for server in table["server_list"]:
        for entry in server["device"]:
            del entry["super_device_id"]
    assert {rule for rule, _, _ in findings(table)} == {"P1", "R24"}
    del table["super_pod_list"]
    assert {rule for rule, _, _ in findings(table)} == {"P1", "R16", "R17"}


def test_odd_values_in_the_lists_are_reported_and_never_raise():
    for odd in (None, 3, "x", [], {}, [None], [{"server_id": 3}], [{"super_pod_id": [], "server_list": {}}]):
        for version, key in (("1.2", "super_pod_list"), ("1.4", "cluster_list"), ("1.0", "cluster_list")):
            try:
                findings({**super_pod_table(), "version": version, key: odd})
                findings({"version": "1.0", "status": "completed", "server_group_list": odd})
            except RankTableError as error:
                assert "not a" in str(error)
