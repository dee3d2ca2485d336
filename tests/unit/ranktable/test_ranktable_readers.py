"""What single readers demand beyond HCCL's rules, and which kinds of tables readers and chips read."""

import json
import os
from pathlib import Path

import pytest
import yaml
from rank_tables import findings, plain_table, service_table

from ranktable import Device, Group, ProfileError, RankTable, Server, validate_file, validate_table
from ranktable.cli import main
from ranktable.kinds import codec_names
from ranktable.profile import build_profile
from ranktable.rules import registered_rules

CATALOGUE = Path(__file__).parent / "catalogue"


def numbered(table):
    """Return the table with its ranks counted in the order of the file."""
    devices = [device for server in table["server_list"] for device in server["device"]]
    for rank, device in enumerate(devices):
        device["rank_id"] = str(rank)
    return table


@pytest.mark.parametrize("reader", ["hccl", "mindspore", "mindie-llm"])
def test_a_table_that_every_reader_takes_has_no_finding(reader):
    assert findings(plain_table(), chip="a2", reader=reader) == []


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
    table = plain_table()
    change(table)
    found = [(rule, path) for rule, _, path in findings(table, chip="a2", reader="mindie-llm")]
    assert sorted(found) == sorted(expected)
    assert not any(rule.startswith("P") for rule, _, _ in findings(table, chip="a2"))


@pytest.mark.parametrize(
    ("num_servers", "num_devices", "rules"),
    [(60, 2, set()), (61, 2, {"P11"}), (2, 33, {"P12"}), (32, 16, set()), (33, 16, {"P13"})],
)
def test_mindie_llm_has_limits_of_size(num_servers, num_devices, rules):
    found = findings(numbered(plain_table(num_servers, num_devices)), chip="a3", reader="mindie-llm")
    assert {rule for rule, _, _ in found if rule.startswith("P")} == rules


@pytest.mark.parametrize(
    ("mode", "rules"), [(0o640, []), (0o600, []), (0o644, ["P10"]), (0o660, ["P10"]), (0o750, ["P10"])]
)
def test_mindie_llm_refuses_a_file_with_more_permissions(tmp_path, mode, rules):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(plain_table()))
    path.chmod(mode)
    report = validate_file(path, chip="a2", profile="mindie-llm")
    assert [problem.rule for problem in report.problems] == rules
    assert validate_file(path, chip="a2").problems == ()


def test_the_permissions_of_a_link_are_those_of_its_file_and_a_pipe_has_none(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(plain_table()))
    path.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert validate_file(link, chip="a2", profile="mindie-llm").problems == ()
    source, target = os.pipe()
    os.write(target, json.dumps(plain_table()).encode())
    os.close(target)
    rules = [problem.rule for problem in validate_file(f"/dev/fd/{source}", chip="a2", profile="mindie-llm").problems]
    os.close(source)
    assert rules == ["R1"]


def test_mindspore_demands_the_string_order_of_addresses():
    table = plain_table()
    table["server_list"][0]["server_id"], table["server_list"][1]["server_id"] = "10.0.0.9", "10.0.0.10"
    expected = ("R11", "server_list[1].server_id")
    for reader, severity in ((None, "warning"), ("mindspore", "error")):
        assert findings(table, chip="a2", reader=reader) == [(expected[0], severity, expected[1])]
    assert findings(table, chip="a2", reader="hccl") == findings(table, chip="a2", reader="mindie-llm") == []
    table["server_list"][0]["server_id"], table["server_list"][1]["server_id"] = "node1", "node2"
    assert [rule for rule, _, _ in findings(table, chip="a2", reader="mindspore")] == ["P6", "P6"]
    assert findings(table, chip="a2") == []


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        (plain_table(), {"reader": "mindie-motor"}, ("P1", "error")),
        (service_table(), {"reader": "hccl"}, ("P1", "error")),
        (service_table(), {"reader": "mindie-llm"}, ("P1", "error")),
        ({**plain_table(), "version": "1.3", "data_version": 1}, {}, ("P1", "warning")),
        ({**plain_table(), "version": "1.3", "data_version": 1}, {"reader": "hccl"}, ("P1", "error")),
        (plain_table(), {"chip": "a5"}, ("P2", "error")),
        ({**plain_table(), "version": "1.2"}, {"chip": "a2"}, ("P2", "warning")),
        ({**plain_table(), "version": "1.2"}, {"chip": "a3"}, None),
    ],
)
def test_readers_and_chips_read_certain_kinds_of_tables(value, options, expected):
    found = [(rule, severity) for rule, severity, path in findings(value, **options) if path.endswith("version")]
    assert found == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("number", "expected"),
    [("1", ("R4", "error")), (True, ("R4", "error")), (-1, ("R4", "error")), (None, ("R5", "warning"))],
)
def test_the_count_of_writings_is_an_integer(number, expected):
    table = {**plain_table(), "version": "1.3", "data_version": number}
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
    path.write_text(json.dumps(plain_table(1)))
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
    path.write_text(json.dumps(plain_table()))
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


@pytest.mark.parametrize("folder", ["super_pod", "volcano", "cross_cluster", "mindie", "profiles"])
def test_the_register_tells_the_severity_and_the_chip_of_what_is_found(folder):
    register = {entry.rule_id: entry for entry in registered_rules()}
    for expected in yaml.safe_load((CATALOGUE / folder / "expected.yaml").read_text()).values():
        for rule_id, severity, *_ in expected["findings"]:
            entry, chip = register[rule_id], expected.get("chip")
            assert severity in entry.severity
            assert chip is None or not entry.chips or chip in entry.chips


def test_the_rules_are_chosen_by_dialect_chip_and_profile(run):
    def ids(*options):
        return {entry["rule"] for entry in json.loads(run("rules", "--format", "json", *options)[1])}

    everything = ids()
    assert everything - ids("--dialect", "1.0") >= {"R24", "R25", "R26", "P4", "P23"}
    assert everything - ids("--chip", "a3") >= {"R12", "R17", "R18", "R19", "R20"}
    assert ids("--profile", "mindie-llm") & {"P6", "P10", "P20"} == {"P10"}
    assert run("rules", "--dialect", "9.9")[0] == 2


def test_the_rules_of_text_and_structure_are_listed_for_every_dialect_that_is_read():
    held = {name: {entry.rule_id for entry in registered_rules() if name in entry.dialects} for name in codec_names()}
    missing = {name: {"R1", "R2", "R3", "R4", "R5", "R31", "R32"} - rules for name, rules in held.items()}
    assert {name: rules for name, rules in missing.items() if rules} == {}
