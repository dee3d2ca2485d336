"""What the data files cannot say of the rules: odd values never raise, the register, profiles, a table in memory."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rank_tables import findings, plain_table, super_pod_table

from ranktable import Device, RankTable, RankTableError, Server, validate_table
from ranktable.errors import BuildError
from ranktable.kinds import read_names
from ranktable.profile import build_profile
from ranktable.rules import registered_rules

CATALOGUE = Path(__file__).parent / "catalogue"
PLACES = [
    *(("version",), ("status",), ("server_count",), ("server_list",), ("server_list", 0), ("super_pod_list",)),
    *(("server_list", 0, key) for key in ("server_id", "host_ip", "device")),
    *(("server_list", 0, "device", 0, key) for key in ("device_id", "device_ip", "rank_id", "device_port")),
    *(("server_list", 0, "device", 0, key) for key in ("host_port", "backup_device_ip", "backup_device_port", "other")),
]
ODD_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.sampled_from(["0", "7", "", "*", ",", "::1", "1.2.3.4,", "1.0", "1.2", "1.4"]),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.text(), children, max_size=2),
    max_leaves=4,
)


def put(value, path, member):
    """Set the member at `path` as far as the value still has that place."""
    step, *rest = path
    if isinstance(value, list if isinstance(step, int) else dict) and (step in value or (step == 0 and value)):
        if rest:
            put(value[step], rest, member)
        else:
            value[step] = member
    elif isinstance(value, dict) and not rest and isinstance(step, str):
        value[step] = member


@given(
    st.sampled_from([plain_table, super_pod_table]),
    st.lists(st.tuples(st.sampled_from(PLACES), ODD_VALUES), max_size=4),
    st.sampled_from(["ascend", "cpu"]),
)
def test_odd_values_are_reported_and_never_raise(make, changes, target):
    table = make()
    for path, value in changes:
        put(table, path, value)
    try:
        findings(table, device_target=target)
    except RankTableError as error:
        assert "not a" in str(error)


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


@pytest.mark.parametrize("listing", CATALOGUE.glob("*/expected.yaml"), ids=lambda path: path.parent.name)
def test_the_register_tells_the_severity_and_the_chip_of_what_is_found(listing):
    register = {entry.rule_id: entry for entry in registered_rules()}
    for expected in yaml.safe_load(listing.read_text()).values():
        for rule_id, severity, *_ in expected.get("findings", ()):
            entry, chip = register[rule_id], expected.get("chip")
            assert severity in entry.severity or (severity == "warning" and entry.chips and chip is None)
            assert chip is None or not entry.chips or chip in entry.chips


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
