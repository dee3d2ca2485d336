"""What single readers demand beyond HCCL's rules, and which kinds of tables readers and chips read."""

import json
import os

import pytest

from ranktable import Device, Group, ProfileError, RankTable, Server, validate_file, validate_table
from ranktable.cli import main
from ranktable.profile import build_profile
from ranktable.reading.document import parse_document
from ranktable.rules import registered_rules
from ranktable.validate import validate_document


def good_table(num_servers=2, num_devices=2, **server):
    """Return a table that every reader of version 1.0 takes on A2."""
    return {
        "version": "1.0",
        "server_count": str(num_servers),
        "server_list": [
            {
                "server_id": f"10.0.{place}.1",
                "container_ip": f"10.1.{place}.1",
                **server,
                "device": [
                    {
                        "device_id": str(number),
                        "device_ip": f"10.2.{place}.{number + 1}",
                        "rank_id": str(place * num_devices + number),
                    }
                    for number in range(num_devices)
                ],
            }
            for place in sorted(range(num_servers), key=str)
        ],
        "status": "completed",
    }


def numbered(table):
    """Return the table with its ranks counted in the order of the file."""
    devices = [device for server in table["server_list"] for device in server["device"]]
    for rank, device in enumerate(devices):
        device["rank_id"] = str(rank)
    return table


def good_service():
    """Return a global table that MindIE-Motor takes: a coordinator, a controller and two instances."""

    def instance(group, ranks_from):
        return {
            "group_id": group,
            "deploy_server": "1",
            "server_count": "2",
            "server_list": [
                {
                    "server_id": f"10.0.{group}.{node + 1}",
                    "server_ip": f"10.1.{group}.{node + 1}",
                    "device": [
                        {
                            "device_id": str(number),
                            "device_ip": f"10.2.{group}.{node * 8 + number}",
                            "rank_id": str(rank),
                        }
                        for number, rank in enumerate(range(ranks_from + node * 4, ranks_from + node * 4 + 4))
                    ],
                }
                for node in range(2)
            ],
        }

    controls = [
        {"group_id": name, "server_count": "1", "server_list": [{"server_ip": f"10.1.{name}.9"}]} for name in ("0", "1")
    ]
    return {
        "version": "1.0",
        "status": "completed",
        "server_group_list": [*controls, instance("2", 0), instance("3", 0)],
    }


def findings(value, **options):
    document = parse_document(json.dumps(value).encode(), "t.json")
    report = validate_document(document, build_profile(**options))
    return [(problem.rule, problem.severity, problem.path) for problem in report.problems]


@pytest.mark.parametrize("reader", ["hccl", "mindspore", "mindie-llm"])
def test_a_table_that_every_reader_takes_has_no_finding(reader):
    assert findings(good_table(), chip="a2", reader=reader) == []


def first(key, value):
    def change(table):
        table["server_list"][0]["device"][0][key] = value

    return change


def drop(key, *path):
    def change(table):
        holder = table
        for step in path:
            holder = holder[step]
        del holder[key]

    return change


DEVICE = "server_list[0].device[0]"
LLM = [
    (lambda table: table["server_list"].pop(), [("R6", "server_count"), ("P11", "server_list")]),
    (drop("server_count"), [("R5", "server_count"), ("P11", "server_count")]),
    (drop("container_ip", "server_list", 1), [("P14", "server_list[1].container_ip")]),
    (lambda table: table["server_list"][1].update(container_ip=""), [("P14", "server_list[1].container_ip")]),
    (
        drop(0, "server_list", 1, "device"),
        [("P12", "server_list[1].device"), ("R9", "server_list[1].device[0].rank_id")],
    ),
    (first("device_ip", "10.2.0.1,10.3.0.1"), [("R15", f"{DEVICE}.device_ip"), ("P15", f"{DEVICE}.device_ip")]),
    (first("device_ip", "fd00::1"), [("R15", f"{DEVICE}.device_ip"), ("P15", f"{DEVICE}.device_ip")]),
    (
        drop("device_ip", "server_list", 0, "device", 0),
        [("R16", f"{DEVICE}.device_ip"), ("P15", f"{DEVICE}.device_ip")],
    ),
]


@pytest.mark.parametrize(("change", "expected"), LLM)
def test_what_mindie_llm_refuses_is_found(change, expected):
    table = good_table()
    change(table)
    found = [(rule, path) for rule, _, path in findings(table, chip="a2", reader="mindie-llm")]
    assert sorted(found) == sorted(expected)
    assert not any(rule.startswith("P") for rule, _, _ in findings(table, chip="a2"))


@pytest.mark.parametrize(
    ("num_servers", "num_devices", "rules"),
    [(60, 2, set()), (61, 2, {"P11"}), (2, 33, {"P12"}), (32, 16, set()), (33, 16, {"P13"})],
)
def test_mindie_llm_has_limits_of_size(num_servers, num_devices, rules):
    found = findings(numbered(good_table(num_servers, num_devices)), chip="a3", reader="mindie-llm")
    assert {rule for rule, _, _ in found if rule.startswith("P")} == rules


@pytest.mark.parametrize(
    ("mode", "rules"), [(0o640, []), (0o600, []), (0o644, ["P10"]), (0o660, ["P10"]), (0o750, ["P10"])]
)
def test_mindie_llm_refuses_a_file_with_more_permissions(tmp_path, mode, rules):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(good_table()))
    path.chmod(mode)
    report = validate_file(path, chip="a2", profile="mindie-llm")
    assert [problem.rule for problem in report.problems] == rules
    assert validate_file(path, chip="a2").problems == ()


def test_the_permissions_of_a_link_are_those_of_its_file_and_a_pipe_has_none(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(good_table()))
    path.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert validate_file(link, chip="a2", profile="mindie-llm").problems == ()
    source, target = os.pipe()
    os.write(target, json.dumps(good_table()).encode())
    os.close(target)
    rules = [problem.rule for problem in validate_file(f"/dev/fd/{source}", chip="a2", profile="mindie-llm").problems]
    os.close(source)
    assert rules == ["R1"]


def test_mindspore_demands_the_string_order_of_addresses():
    table = good_table()
    table["server_list"][0]["server_id"], table["server_list"][1]["server_id"] = "10.0.0.9", "10.0.0.10"
    expected = ("R11", "server_list[1].server_id")
    for reader, severity in ((None, "warning"), ("mindspore", "error")):
        assert findings(table, chip="a2", reader=reader) == [(expected[0], severity, expected[1])]
    assert findings(table, chip="a2", reader="hccl") == findings(table, chip="a2", reader="mindie-llm") == []
    table["server_list"][0]["server_id"], table["server_list"][1]["server_id"] = "node1", "node2"
    assert [rule for rule, _, _ in findings(table, chip="a2", reader="mindspore")] == ["P6", "P6"]
    assert findings(table, chip="a2") == []


def test_a_good_service_has_no_finding():
    assert findings(good_service()) == findings(good_service(), reader="mindie-motor", chip="a2") == []


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
    service = good_service()
    change(service)
    assert {(rule, path) for rule, _, path in findings(service, chip="a2")} >= expected
    assert bool(findings(service, chip="a2")) == bool(expected)


def test_mindie_motor_has_limits_of_size():
    service = good_service()
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
    service = good_service()
    second = service["server_group_list"][2]["server_list"][1]
    for number, device in enumerate(second["device"]):
        device["rank_id"] = str(number)
    assert ("R9", "error", f"{G2}.server_list[1].device[0].rank_id") in findings(service)
    service["server_group_list"][2]["deploy_server"] = "0"
    assert findings(service) == []
    second["device"][3]["rank_id"] = "7"
    assert ("R9", "error", f"{G2}.server_list[1].device[3].rank_id") in findings(service)


def test_two_pods_of_one_host_are_a_warning():
    service = good_service()
    service["server_group_list"][2]["server_list"][1]["server_id"] = "10.0.2.1"
    assert ("R7", "warning", f"{G2}.server_list[1].server_id") in findings(service)


def test_an_address_is_unique_over_all_groups():
    service = good_service()
    service["server_group_list"][3]["server_list"][0]["device"][0]["device_ip"] = "10.2.2.0"
    assert findings(service) == [("R14", "error", "server_group_list[3].server_list[0].device[0].device_ip")]


def test_a_service_that_is_not_ready_is_told_apart():
    document = parse_document(json.dumps({**good_service(), "status": "initializing"}).encode(), "t.json")
    assert validate_document(document, build_profile()).exit_code() == 3


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        (good_table(), {"reader": "mindie-motor"}, ("P1", "error")),
        (good_service(), {"reader": "hccl"}, ("P1", "error")),
        (good_service(), {"reader": "mindie-llm"}, ("P1", "error")),
        ({**good_table(), "version": "1.3", "data_version": 1}, {}, ("P1", "warning")),
        ({**good_table(), "version": "1.3", "data_version": 1}, {"reader": "hccl"}, ("P1", "error")),
        (good_table(), {"chip": "a5"}, ("P2", "error")),
        ({**good_table(), "version": "1.2"}, {"chip": "a2"}, ("P2", "warning")),
        ({**good_table(), "version": "1.2"}, {"chip": "a3"}, None),
    ],
)
def test_readers_and_chips_read_certain_kinds_of_tables(value, options, expected):
    found = [(rule, severity) for rule, severity, path in findings(value, **options) if path.endswith("version")]
    assert found == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("number", "expected"), [("1", ("R4", "error")), (-1, ("R4", "error")), (None, ("R5", "warning"))]
)
def test_the_count_of_writings_is_an_integer(number, expected):
    table = {**good_table(), "version": "1.3", "data_version": number}
    if number is None:
        del table["data_version"]
    assert (*expected, "data_version") in findings(table)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reader": "tensorflow"}, "profile 'tensorflow' is not known; choose one of hccl, mindspore, mindie-llm"),
        ({"reader": "hccl", "device_target": "cpu"}, "profile 'hccl' does not go with device_target 'cpu'"),
        ({"network_plan": 24, "device_target": "gpu"}, "network_plan 24 does not go with device_target 'gpu'"),
        ({"network_plan": 0}, "network_plan 0 is no prefix length from 1 to 128"),
    ],
)
def test_an_unknown_reader_or_plan_is_refused(options, says):
    with pytest.raises(ProfileError) as caught:
        build_profile(**options)
    assert says in str(caught.value)


def test_a_table_in_memory_is_held_to_a_reader():
    table = RankTable("mindie-global", (Server("node", (Device(0, 0),), group="2"),), groups=(Group("2"),))
    rules = {problem.rule for problem in validate_table(table, chip="a2")}
    assert rules == {"R5", "P20", "P23"}
    assert {problem.rule for problem in validate_table(table, profile="hccl")} >= {"P1"}


@pytest.fixture
def run(capsys):
    def call(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_validate_takes_a_profile_and_says_so(run, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(good_table(1)))
    path.chmod(0o640)
    status, out, _ = run("validate", path, "--chip", "a2", "--profile", "MindIE-LLM")
    assert status == 1
    assert "error P11 server_list: the table has 1 server, it takes 2 to 60" in out
    assert "checked for a2 and mindie-llm" in out
    status, out, _ = run("validate", path, "--chip", "a2", "--profile", "hccl", "--format", "json")
    assert (status, json.loads(out)[0]["profile"]) == (0, "hccl")


@pytest.mark.parametrize("option", ["--network_plan", "--network-plan"])
def test_validate_takes_a_network_plan(run, tmp_path, option):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(good_table()))
    status, out, _ = run("validate", path, "--chip", "a2", option, "24")
    assert status == 0
    assert "warning R23" in out
    assert run("validate", path, "--chip", "a2", option, "16")[1].endswith(
        "valid (version 1.0, 2 servers, 4 devices, checked for a2)\n"
    )
    assert run("validate", path, option, "129")[0] == 2


def test_the_rules_are_listed_from_the_register(run):
    status, out, _ = run("rules")
    lines = out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines[1:]] == [entry.rule_id for entry in registered_rules()]
    assert all(entry.title in line for entry, line in zip(registered_rules(), lines[1:], strict=True))


def test_the_rules_are_chosen_by_dialect_chip_and_profile(run):
    def ids(*options):
        return {entry["rule"] for entry in json.loads(run("rules", "--format", "json", *options)[1])}

    everything = ids()
    assert everything - ids("--dialect", "1.0") >= {"R24", "R25", "R26", "P4", "P23"}
    assert everything - ids("--chip", "a3") >= {"R12", "R17", "R18", "R19", "R20"}
    assert ids("--profile", "mindie-llm") & {"P6", "P10", "P20"} == {"P10"}
    assert run("rules", "--dialect", "9.9")[0] == 2
