"""The global table of an inference service: its groups, and what MindIE-Motor demands of them."""

import json

import pytest
from rank_tables import findings, plain_table, service_table

from ranktable.profile import build_profile
from ranktable.reading.document import parse_document
from ranktable.validate import validate_document


def test_a_service_table_has_no_finding():
    assert findings(service_table()) == findings(service_table(), reader="mindie-motor", chip="a2") == []


def server(group, node, key, value):
    def change(service):
        service["server_group_list"][group]["server_list"][node][key] = value

    return change


def group(index, key, value):
    def change(service):
        service["server_group_list"][index][key] = value

    return change


def rank(index, node, number, value):
    def change(service):
        service["server_group_list"][index]["server_list"][node]["device"][number]["rank_id"] = value

    return change


G2 = "server_group_list[2]"
MOTOR = [
    (lambda service: service["server_group_list"].pop(0), {("P23", "server_group_list")}),
    (lambda service: service["server_group_list"].__delitem__(slice(2, 4)), {("P23", "server_group_list")}),
    (group(0, "server_list", []), {("R6", "server_group_list[0].server_count")}),
    (server(2, 0, "server_ip", "0.0.0.0"), {("P20", f"{G2}.server_list[0].server_ip")}),
    (server(2, 0, "server_id", "node1"), {("P20", f"{G2}.server_list[0].server_id")}),
    (server(2, 0, "server_ip", "10.1.2.2"), {("P20", f"{G2}.server_list[1].server_ip")}),
    (server(2, 0, "server_id", "10.0.2.2"), {("R7", f"{G2}.server_list[1].server_id")}),
    (server(2, 0, "hardware_type", "800I A2(64G)"), set()),
    (server(2, 0, "hardware_type", "toaster"), {("P24", f"{G2}.server_list[0].hardware_type")}),
    (server(2, 0, "predict_port", "1025"), set()),
    (rank(2, 0, 0, "8"), {("R9", f"{G2}.server_list[0].device[0].rank_id"), ("R10", f"{G2}.server_list[0].device")}),
    (group(2, "server_count", "3"), {("R6", f"{G2}.server_count")}),
    (group(2, "group_id", "3"), {("P5", "server_group_list[3].group_id")}),
    (server(3, 0, "server_id", "10.0.2.1"), set()),
]


@pytest.mark.parametrize(("change", "expected"), MOTOR)
def test_what_mindie_motor_refuses_is_found_in_its_group(change, expected):
    service = service_table()
    change(service)
    assert {(rule, path) for rule, _, path in findings(service, chip="a2")} >= expected
    assert bool(findings(service, chip="a2")) == bool(expected)


def test_mindie_motor_has_limits_of_size():
    service = service_table()
    coordinators, members = service["server_group_list"][0], service["server_group_list"][2]
    coordinators["server_list"] = [{"server_ip": f"10.1.0.{place + 1}"} for place in range(3)]
    members["server_list"] = [
        {**members["server_list"][0], "server_ip": f"10.3.{place // 250}.{place % 250}"} for place in range(97)
    ]
    found = {(rule, path) for rule, _, path in findings(service)}
    assert {("P22", f"{G2}.server_list"), ("P23", "server_group_list[0].server_list")} <= found
    devices = [{"device_id": str(number), "rank_id": str(number)} for number in range(129)]
    members["server_list"] = [{"server_id": "10.0.2.1", "server_ip": "10.1.2.1", "device": devices}]
    assert ("P21", "error", f"{G2}.server_list[0].device") in findings(service)


def test_servers_that_are_instances_of_their_own_count_their_ranks_from_zero():
    service = service_table()
    second = service["server_group_list"][2]["server_list"][1]
    for number, device in enumerate(second["device"]):
        device["rank_id"] = str(number)
    assert ("R9", "error", f"{G2}.server_list[1].device[0].rank_id") in findings(service)
    service["server_group_list"][2]["deploy_server"] = "0"
    assert findings(service) == []
    second["device"][3]["rank_id"] = "7"
    assert ("R9", "error", f"{G2}.server_list[1].device[3].rank_id") in findings(service)


def test_two_pods_of_one_host_are_a_warning():
    service = service_table()
    service["server_group_list"][2]["server_list"][1]["server_id"] = "10.0.2.1"
    assert ("R7", "warning", f"{G2}.server_list[1].server_id") in findings(service)
    table = plain_table()
    for place, entry in enumerate(table["server_list"]):
        entry.update(server_id="10.0.0.1", server_ip=f"10.1.0.{place}")
    assert findings(table, chip="a2") == [("R7", "error", "server_list[1].server_id")]


def test_an_address_is_unique_over_all_groups():
    service = service_table()
    service["server_group_list"][3]["server_list"][0]["device"][0]["device_ip"] = "10.2.2.0"
    assert findings(service) == [("R14", "error", "server_group_list[3].server_list[0].device[0].device_ip")]


def test_a_service_that_is_not_ready_is_told_apart():
    document = parse_document(json.dumps({**service_table(), "status": "initializing"}).encode(), "t.json")
    assert validate_document(document, build_profile()).exit_code() == 3
