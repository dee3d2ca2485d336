"""Each rule of version 1.0, shown by the smallest change to a good table that breaks it."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktable import Device, ProfileError, RankTable, RankTableError, Server, validate_table
from ranktable.profile import build_profile
from ranktable.document import parse_document
from ranktable.rules import registered_rules
from ranktable.validate import validate_document
from ranktable.values import name_placeholder


def good_table(num_servers=2, num_devices=8):
    """Return a table without a finding on any chip."""
    return {
        "version": "1.0",
        "server_count": str(num_servers),
        "server_list": [
            {
                "server_id": f"10.0.0.{server + 1}",
                "device": [
                    {
                        "device_id": str(device),
                        "device_ip": f"192.168.{server}.{device + 1}",
                        "rank_id": str(server * num_devices + device),
                    }
                    for device in range(num_devices)
                ],
            }
            for server in range(num_servers)
        ],
        "status": "completed",
    }


def findings(value, device_target="ascend", chip=None):
    """Return (rule, severity, path) of every finding."""
    document = parse_document(json.dumps(value).encode(), "t.json")
    report = validate_document(document, build_profile(device_target, chip))
    return [(problem.rule, problem.severity, problem.path) for problem in report.problems]


def change(path, value, **table):
    """Return the good table with the member at `path` (keys and indexes) replaced, or removed when value is None."""
    changed = copy.deepcopy(good_table(**table))
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    if value is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return changed


def device(index, key, server=0):
    return ("server_list", server, "device", index, key)


def at(index, key, server=0):
    return f"server_list[{server}].device[{index}].{key}"


ONE = {"num_servers": 1}
BROKEN = [
    (("version",), None, {}, [("R2", "error", "version")]),
    (("version",), "3.0", {}, [("R2", "error", "version")]),
    (("version",), 1.0, {}, [("R4", "error", "version")]),
    (("status",), "unknown", {}, [("R3", "error", "status")]),
    (("status",), None, {}, [("R5", "error", "status")]),
    (("server_count",), 2, {}, [("R4", "error", "server_count")]),
    (("server_count",), None, {}, [("R5", "warning", "server_count")]),
    (("server_count",), "3", {}, [("R6", "error", "server_count")]),
    (("server_count",), "two", {}, [("R6", "error", "server_count")]),
    (("server_list", 0, "server_id"), "", {}, [("R7", "error", "server_list[0].server_id")]),
    (("server_list", 0, "server_id"), "1" * 65, {}, [("R7", "error", "server_list[0].server_id")]),
    (("server_list", 0, "server_id"), "10.xx.xx.1", ONE, [("R7", "error", "server_list[0].server_id")]),
    (("server_list", 0, "server_id"), "10.0.0.2", {}, [("R7", "error", "server_list[1].server_id")]),
    (("server_list", 1, "server_id"), "127.0.0.1", {}, [("R7", "warning", "server_list[1].server_id")]),
    (("server_list", 0, "server_id"), "127.0.0.1", ONE, []),
    (device(1, "device_id"), "x", {}, [("R8", "error", at(1, "device_id"))]),
    (device(1, "device_id"), "01", {}, [("R8", "error", at(1, "device_id"))]),
    (device(1, "device_id"), "-1", {}, [("R8", "error", at(1, "device_id"))]),
    (device(1, "device_id"), "0", {}, [("R8", "error", at(1, "device_id"))]),
    (device(7, "device_id"), "99", {}, [("R8", "error", at(7, "device_id"))]),
    (device(7, "rank_id"), "16", {}, [("R9", "error", at(7, "rank_id"))]),
    (device(7, "rank_id"), "6", {}, [("R9", "error", at(7, "rank_id"))]),
    (device(7, "rank_id"), "9" * 5000, {}, [("R9", "error", at(7, "rank_id"))]),
    (("server_list", 0, "server_id"), "10.0.0.3", {}, [("R11", "warning", "server_list[1].server_id")]),
    (device(0, "device_ip"), "10.*.*.*", {}, [("R13", "error", at(0, "device_ip"))]),
    (device(0, "device_ip"), "<ip>", {}, [("R13", "error", at(0, "device_ip"))]),
    (device(0, "device_ip"), "", {}, [("R13", "error", at(0, "device_ip"))]),
    (device(0, "device_ip"), "0.0.0.0", {}, [("R13", "error", at(0, "device_ip"))]),
    (device(0, "device_ip"), "224.0.0.1", {}, [("R13", "error", at(0, "device_ip"))]),
    (device(0, "device_ip"), "255.255.255.255", {}, [("R13", "error", at(0, "device_ip"))]),
    (device(0, "device_ip"), "192.168.1.256", {}, [("R13", "error", at(0, "device_ip"))]),
    (device(0, "device_ip"), "127.0.0.1", {}, [("R13", "error", at(0, "device_ip"))]),
    (device(0, "device_ip"), "127.0.0.1", ONE, [("R13", "warning", at(0, "device_ip"))]),
    (device(1, "device_ip", 1), "192.168.0.1", {}, [("R14", "error", at(1, "device_ip", 1))]),
    (device(0, "device_ip"), "fe80::1", {}, [("R15", "error", at(0, "device_ip"))]),
    (device(0, "device_ip"), "192.168.9.1,192.168.9.2", {}, [("R15", "error", at(0, "device_ip"))]),
    (("server_list", 0, "host_ip"), "host-a", {}, [("R15", "error", "server_list[0].host_ip")]),
    (("server_list", 0, "host_ip"), "10.0.0.1", {}, []),
    (device(3, "device_ip"), None, {}, [("R16", "error", at(3, "device_ip"))]),
    (device(3, "device_ip"), None, ONE, [("R16", "warning", at(3, "device_ip"))]),
    (device(0, "device_port"), "0", {}, [("R22", "error", at(0, "device_port"))]),
    (device(0, "device_port"), "65536", {}, [("R22", "error", at(0, "device_port"))]),
    (device(0, "device_port"), "80", {}, [("R22", "warning", at(0, "device_port"))]),
    (device(0, "device_port"), "1", {}, [("R22", "warning", at(0, "device_port"))]),
    (device(0, "device_port"), "1023", {}, [("R22", "warning", at(0, "device_port"))]),
    (device(0, "device_port"), "1024", {}, []),
    (device(0, "device_port"), "65535", {}, []),
    (device(0, "device_port"), "port", {}, [("R22", "error", at(0, "device_port"))]),
    (device(0, "backup_device_ip"), "192.168.0.2", {}, []),
    (device(0, "backup_device_ip"), "192.168.0.1", {}, [("R27", "error", at(0, "backup_device_ip"))]),
    (device(0, "backup_device_ip"), "192.168.0.3", {}, [("R27", "error", at(0, "backup_device_ip"))]),
    (device(0, "backup_device_ip"), "x", {}, [("R27", "error", at(0, "backup_device_ip"))]),
    (device(0, "backup_device_port"), "16666", {}, [("R27", "error", at(0, "backup_device_port"))]),
    (device(0, "deviceIp"), "10.0.0.1", {}, [("R31", "warning", at(0, "deviceIp"))]),
    (device(0, "super_device_id"), "0", {}, [("R31", "warning", at(0, "super_device_id"))]),
    (("server_list", 0, "container_ip"), "10.0.0.1", {}, []),
    (("server_list", 0, "device"), [], {}, [("R5", "error", "server_list[0].device")]),
    (("server_list", 0, "device"), {}, ONE, [("R5", "error", "server_list[0].device")]),
]


def test_one_change_gives_one_finding():
    for path, value, table, expected in BROKEN:
        if expected and expected[0][0] in ("R3", "R4", "R13", "R14", "R16", "R22", "R27", "R31"):
            assert findings(change(path, value, **table)) == expected


def test_a_server_with_fewer_devices_than_the_others_is_named():
    table = good_table(3)
    table["server_list"][2]["device"] = table["server_list"][2]["device"][:4]
    assert ("R20", "error", "server_list[2].device") in findings(table, chip="910a")
    assert findings(table, chip="a2") == []


def test_more_devices_than_any_board_has_are_a_warning():
    assert ("R21", "warning", "server_list[0].device") in findings(good_table(1, 17))


PLACES = [
    ("version",),
    ("status",),
    ("server_count",),
    ("server_list",),
    ("server_list", 0),
    ("server_list", 0, "server_id"),
    ("server_list", 0, "host_ip"),
    ("server_list", 0, "device"),
    ("server_list", 0, "device", 0),
    *(("server_list", 0, "device", 0, key) for key in ("device_id", "device_ip", "rank_id", "device_port")),
    *(("server_list", 0, "device", 0, key) for key in ("host_port", "backup_device_ip", "backup_device_port", "other")),
]
ODD_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.sampled_from(["0", "7", "", "*", ",", "::1", "1.2.3.4,"]),
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


@given(st.lists(st.tuples(st.sampled_from(PLACES), ODD_VALUES), max_size=4), st.sampled_from(["ascend", "cpu"]))
def test_odd_values_are_reported_and_never_raise(changes, target):
    table = good_table(num_devices=2)
    for path, value in changes:
        put(table, path, value)
    try:
        findings(table, target)
    except RankTableError as error:
        assert "not a" in str(error)


def test_every_finding_has_a_message_and_a_remedy():
    for path, value, table, _ in BROKEN:
        document = parse_document(json.dumps(change(path, value, **table)).encode(), "t.json")
        for problem in validate_document(document, build_profile()).problems:
            assert problem.message
            assert problem.remedy
            assert problem.position is not None


def test_the_register_is_in_order_and_complete():
    ids = [rule.rule_id for rule in registered_rules()]
    numbers = [rule.number for rule in registered_rules() if rule.rule_id.startswith("R")]
    assert numbers == sorted(set(numbers))
    assert set(range(1, 28)) | {31, 32} <= set(numbers)
    assert ids[len(numbers) :] == sorted(ids[len(numbers) :], key=lambda name: (name[0], int(name[1:])))
    assert all(rule.title for rule in registered_rules())


@pytest.mark.parametrize(
    ("target", "chip", "says"),
    [
        ("tpu", None, "device_target 'tpu' is not known; choose one of ascend, gpu, cpu"),
        ("ascend", "a4", "chip 'a4' is not known; choose one of 910a, a2, a3, a5, 300i-duo"),
        ("cpu", "a2", "chip 'a2' does not go with device_target 'cpu'"),
    ],
)
def test_an_unknown_profile_is_refused(target, chip, says):
    with pytest.raises(ProfileError) as caught:
        build_profile(target, chip)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("10.*.*.*", "a mask"),
        ("xx.xx", "a mask"),
        ("xx", "a mask"),
        ("x.x.x.98", "a mask"),
        ("<ip>", "a placeholder"),
        ("[device_ip_0]", "a placeholder"),
        ("${HOST_IP}", "a placeholder"),
        ("your-server", "a placeholder"),
        ("...", "an elision"),
        ("-.-.-.-", "the mark of a tool that could not read the value"),
        ("-", "the mark of a tool that could not read the value"),
        ("10.0.0.1", None),
        ("fe80::1", None),
        ("node-x.example.com", None),
        ("x", None),
        ("host.x.com", None),
        ("my-host", None),
        ("", None),
    ],
)
def test_a_placeholder_is_named(text, name):
    if text == "...":
        assert name_placeholder(text) is not None
    else:
        assert name_placeholder(text) == name


def test_a_table_in_memory_is_checked_as_its_file_would_be():
    table = RankTable("1.0", (Server("10.*.*.*", (Device(0, 0), Device(0, -1))),), declared_server_count=3)
    found = {(problem.rule, problem.path) for problem in validate_table(table, device_target="cpu")}
    assert found == {
        ("R6", "server_count"),
        ("R7", "server_list[0].server_id"),
        ("R8", "server_list[0].device[1].device_id"),
        ("R9", "server_list[0].device[1].rank_id"),
    }
