"""What single readers demand beyond HCCL's rules, and which kinds of tables readers and chips read."""

import json
import os
from pathlib import Path

import pytest
import yaml
from rank_tables import findings, plain_table

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


@pytest.mark.parametrize(
    ("num_servers", "num_devices", "rules"),
    [(60, 2, set()), (61, 2, {"P11"}), (2, 33, {"P12"}), (32, 16, set()), (33, 16, {"P13"})],
)
def test_mindie_llm_has_limits_of_size(num_servers, num_devices, rules):
    found = findings(numbered(plain_table(num_servers, num_devices)), chip="a3", reader="mindie-llm")
    assert {rule for rule, _, _ in found if rule.startswith("P")} == rules


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


@pytest.fixture
def run(capsys):
    def call(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


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


def test_a_table_in_memory_is_held_to_a_reader():
    table = RankTable("mindie-global", (Server("node", (Device(0, 0),), group="2"),), groups=(Group("2"),))
    rules = {problem.rule for problem in validate_table(table, chip="a2")}
    assert rules == {"R5", "P20", "P23"}
    assert {problem.rule for problem in validate_table(table, profile="hccl")} >= {"P1"}
