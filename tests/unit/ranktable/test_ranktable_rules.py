"""Every rule, by tables with exactly the findings that an expert would give, and what data files cannot say of them."""

import copy
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_tables import findings, super_pod_table

from ranktable import Device, RankTable, Server, errors, validate_file, validate_table
from ranktable.errors import BuildError
from ranktable.kinds import read_names
from ranktable.profile import build_profile
from ranktable.rules import registered_rules
from ranktable.values import name_placeholder

CATALOGUE = Path(__file__).parent / "catalogue"
"""A folder of it holds tables and one `expected.yaml`: per table why it is there, the OPTIONS that it is checked with,
`mode`, the permissions that the file has, its findings as [rule, severity, path, line], and `ready: false`. A table
that is not judged at all has `error` in place of findings: the name of the exception."""
OPTIONS = ("device_target", "chip", "profile", "network_plan")
EXPECTED = {
    f"{listing.parent.name}/{name}": expected
    for listing in sorted(CATALOGUE.glob("*/expected.yaml"))
    for name, expected in yaml.load(listing.read_text(encoding="utf-8"), yaml.CSafeLoader).items()
}
JUDGED = [name for name in EXPECTED if "error" not in EXPECTED[name]]


def validate(name):
    options = {option: EXPECTED[name][option] for option in OPTIONS if option in EXPECTED[name]}
    if "mode" not in EXPECTED[name]:
        return validate_file(CATALOGUE / name, **options)
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(shutil.copy(CATALOGUE / name, folder))
        copied.chmod(int(EXPECTED[name]["mode"], 8))
        return validate_file(copied, **options)


@pytest.mark.parametrize("folder", sorted({name.partition("/")[0] for name in JUDGED}))
def test_tables_get_the_expected_findings_at_their_lines(folder):
    for name in [name for name in JUDGED if name.startswith(f"{folder}/")]:
        report = validate(name)
        found = [[problem.rule, problem.severity, problem.path, problem.position.line] for problem in report.problems]
        assert sorted(found) == sorted(EXPECTED[name]["findings"]), name
        assert report.is_ready is EXPECTED[name].get("ready", True), name


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - set(JUDGED)))
def test_a_table_that_is_not_judged_raises_the_expected_error(name):
    with pytest.raises(getattr(errors, EXPECTED[name]["error"])):
        validate(name)


def test_every_file_of_the_catalogue_is_expected():
    files = {f"{path.parent.name}/{path.name}" for path in CATALOGUE.glob("*/*") if path.name != "expected.yaml"}
    assert files == set(EXPECTED)


CHANGES = Path(__file__).parent / "changes"
BASES = {path.stem: json.loads(path.read_text()) for path in CHANGES.glob("*.json")}
CASES = yaml.load((CHANGES / "cases.yaml").read_text(), yaml.CSafeLoader)
STEP = re.compile(r"\.?([A-Za-z_]\w*)|\[(\d+)\]")


def apply(table, path, value):
    *steps, last = [key or int(index) for key, index in STEP.findall(path)]
    for step in steps:
        table = table[step]
    if value == {"gone": True}:
        del table[last]
    elif isinstance(value, dict) and "repeat" in value:
        text, times = value["repeat"]
        table[last] = text * times
    else:
        table[last] = value


@pytest.mark.parametrize("sentence", CASES)
def test_a_changed_table_gets_exactly_the_expected_findings(sentence):
    for case in CASES[sentence]:
        table = copy.deepcopy(BASES[case["base"]])
        for path, value in case.get("set", {}).items():
            apply(table, path, value)
        options = {key: case[key] for key in ("device_target", "chip", "reader") if key in case}
        found = [" ".join(finding).rstrip() for finding in findings(table, **options)]
        assert sorted(found) == sorted(case["found"]), case


@pytest.mark.parametrize(
    ("count", "chip", "severities"),
    [(8, "a2", set()), (9, "a2", {"warning"}), (17, "a2", {"error"}), (16, "a3", set()), (17, "a3", {"error"})],
)
def test_a_chip_has_a_usual_and_a_highest_number_of_devices(count, chip, severities):
    table = {**super_pod_table(1, 1, count), "version": "1.0"}
    assert {severity for rule, severity, _ in findings(table, chip=chip) if rule == "R21"} == severities


def test_the_register_is_in_order_and_each_error_has_a_source():
    entries = registered_rules()
    numbers = [int(entry.rule_id[1:]) for entry in entries if entry.rule_id.startswith("R")]
    assert numbers == sorted(set(numbers))
    assert all(entry.sources or entry.severity == "warning" for entry in entries)
    held = {name: {entry.rule_id for entry in entries if name in entry.dialects} for name in read_names()}
    assert all({"R1", "R2", "R3", "R4", "R5", "R31", "R32"} <= rules for rules in held.values())


def test_the_register_tells_the_severity_and_the_chip_of_what_is_found():
    register = {entry.rule_id: entry for entry in registered_rules()}
    for name in JUDGED:
        chip = EXPECTED[name].get("chip")
        for rule_id, severity, *_ in EXPECTED[name]["findings"]:
            entry = register[rule_id]
            assert severity in entry.severity or (severity == "warning" and entry.chips and chip is None), name
            assert chip is None or not entry.chips or chip in entry.chips, name


def test_the_rules_are_chosen_by_dialect_chip_and_profile(run):
    def ids(*options):
        return {entry["rule"] for entry in json.loads(run("rules", "--format", "json", *options)[1])}

    everything = ids()
    assert everything - ids("--dialect", "1.0") >= {"R24", "R25", "R26", "P4", "P5"}
    assert everything - ids("--chip", "a3") >= {"R12", "R17", "R18", "R19", "R20"}
    assert everything - ids("--profile", "hccl") == {"P6"}
    assert run("rules", "--dialect", "9.9")[0] == 2
    assert [line.split()[0] for line in run("rules")[1].splitlines()[1:]] == [e.rule_id for e in registered_rules()]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device_target": "tpu"}, "device_target 'tpu' is not known; choose one of ascend, gpu, cpu"),
        ({"chip": "a4"}, "chip 'a4' is not known; choose one of 910a, a2, a3, a5, 300i-duo"),
        ({"device_target": "cpu", "chip": "a2"}, "chip 'a2' does not go with device_target 'cpu'"),
        ({"reader": "tensorflow"}, "profile 'tensorflow' is not known; choose one of hccl, mindspore"),
    ],
)
def test_an_unknown_profile_is_refused(options, says):
    with pytest.raises(BuildError) as caught:
        build_profile(**options)
    assert says in str(caught.value)


def test_a_table_in_memory_is_checked_as_its_file_would_be():
    table = RankTable("1.0", (Server("10.*.*.*", (Device(0, 0), Device(0, -1))),), declared_server_count=3)
    found = {(problem.rule, problem.path) for problem in validate_table(table, device_target="cpu")}
    assert found == {
        ("R6", "server_count"),
        ("R7", "server_list[0].server_id"),
        ("R8", "server_list[0].device[1].device_id"),
        ("R9", "server_list[0].device[1].rank_id"),
    }


MASK, TOOL = "a mask", "the mark of a tool that could not read the value"
PLACEHOLDER, RANGE, ELISION = "a placeholder", "a range that was not expanded", "an elision"
NAMED = {
    MASK: "10.*.*.* 172.16.**.** 192.168.x.x 192.168.1.xxx XX.XX.XX.XX x.x.x.98 xxx.xxx.xxx.xxx xx xx.xx x:x:x:x "
    "10.0.0.? ??? 10.0.0.N 192_168_x_x",
    TOOL: "-.-.-.- - -- -.-",
    ELISION: "... 10.0... \u2026 10.0.0.1\u2026",
    RANGE: "192.168.1.[1-8] node[0-3] node[0,1]",
    PLACEHOLDER: "<ip> <IP_ADDRESS> [device_ip_0] [ip] ${IP} $IP $(IP) {ip} {{.IP}} %IP% @IP@ __IP__ (null) dev<id> "
    "N/A None null todo TBD FIXME your-ip your_server_ip my_ip server_ip host_ip device_ip pod_ip ip_address ip_1 "
    "device_ip_7 server_id ip unknown undefined change_me changeme replace-me",
}


@pytest.mark.parametrize("name", NAMED)
def test_what_stands_for_a_value_is_named(name):
    assert [text for text in NAMED[name].split() if name_placeholder(text) != name] == []


HARMLESS = (
    "10.0.0.1 255.255.255.255 fe80::1 2001:db8::9 dead:beef::1 [::1] x x86 x86-64 node-xx xx-host xxl xxl.example.com "
    "xx.com host.x.com node-x.example.com ip-10-0-0-1 ip-10-0-0-1.ec2.internal node_0 server_1 localhost none-such "
    "todo-server yourbank-01 a.b.c.d na"
)


def test_addresses_and_names_of_hosts_are_left_alone():
    assert [text for text in [*HARMLESS.split(), "", "<" * 300] if name_placeholder(text) is not None] == []


@settings(deadline=None)
@given(st.ip_addresses())
def test_no_address_is_a_placeholder(address):
    assert name_placeholder(str(address)) is None


DNS_WORDS = {"todo", "tbd", "fixme", "none", "null", "ip", "unknown", "undefined", "changeme", "replaceme"}


@settings(deadline=None)
@given(st.from_regex(r"[a-wyz][a-z0-9-]{0,20}[a-z0-9](\.[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?){0,3}", fullmatch=True))
def test_no_name_that_dns_allows_is_a_placeholder(name):
    is_word = name in DNS_WORDS or name.startswith(("your-", "change-", "replace-"))
    assert is_word or name_placeholder(name) is None
    assert is_word or name_placeholder(name.upper()) is None
