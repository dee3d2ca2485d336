"""Every rule, by tables with exactly the findings that an expert would give, and what data files cannot say of them.
Mechanical faults are repaired and said; what a person must decide is left alone; good tables never change."""

import copy
import itertools
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from asked_cases import one_fast
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_tables import CATALOGUE, EXPECTED, GOOD, findings, problems_of, super_pod_table

from ranktable import Device, RankTable, Server, build_table, encode_table, errors, validate_file, validate_table
from ranktable.document import parse_document, read_document
from ranktable.errors import BuildError, InvalidTableError, JsonTextError
from ranktable.fix import fix_table, parse_leniently, repair_text
from ranktable.kinds import read_names
from ranktable.profile import build_profile
from ranktable.rules import registered_rules
from ranktable.values import name_placeholder

OPTIONS = ("device_target", "chip", "profile", "network_plan")
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


def problems_of_case(case):
    table = copy.deepcopy(BASES[case["base"]])
    for path, value in case.get("set", {}).items():
        apply(table, path, value)
    return problems_of(table, **{key: case[key] for key in ("device_target", "chip", "reader") if key in case})


@pytest.mark.parametrize("sentence", CASES)
def test_a_changed_table_gets_exactly_the_expected_findings(sentence):
    for case in CASES[sentence]:
        found = [f"{one.rule} {one.severity} {one.path}".rstrip() for one in problems_of_case(case)]
        assert sorted(found) == sorted(case["found"]), case


def test_findings_are_said_in_the_frozen_words(golden):
    found = [problems_of_case(case) for sentence in CASES for case in CASES[sentence]]
    problems = itertools.chain(*found, *(validate(name).problems for name in JUDGED))
    golden(
        "rank_table_findings.txt", "\n".join([*sorted({f"{p.rule}: {p.message}; {p.remedy}" for p in problems}), ""])
    )


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


TABLE_2 = build_table([("10.0.0.1", 2), ("10.0.0.2", 2)], device_ips={"10.0.0.1": ["10.1.0.1", "10.1.0.2"]})
SERVER = '{"server_id": "a", "device": [{"device_id": "0", "rank_id": "0"}]}'


BAD = f'{{"version": "1.0", "status": "completed", "server_list": [{SERVER.replace("server_id", "serverId")},]}}'


def fix_text(text):
    fixed = fix_table(text.encode(), "t.json")
    return fixed.value, [str(repair) for repair in fixed.repairs]


@pytest.mark.parametrize("path", GOOD, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_good_table_of_the_catalogue_is_left_as_it_is(path):
    fixed = fix_table(path.read_bytes(), str(path))
    assert fixed.repairs == ()
    assert fixed.value == read_document(path).value


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damage_of_hands_is_undone(data):
    value = json.loads(encode_table(TABLE_2))
    good = json.loads(encode_table(TABLE_2))
    draw = data.draw
    for holder in [value, *value["server_list"], *(d for s in value["server_list"] for d in s["device"])]:
        for key in list(holder):
            damage = draw(st.sampled_from(["none", "number", "blank", "name", "zero"]))
            text = holder[key]
            if damage == "number" and isinstance(text, str) and text.isdecimal():
                holder[key] = int(text)
            elif damage == "zero" and isinstance(text, str) and text.isdecimal():
                holder[key] = f"0{text}"
            elif damage == "blank" and isinstance(text, str) and key != "status":
                holder[key] = f" {text}\t"
            elif damage == "name":
                renamed = {key.upper().replace("_", "-") if name == key else name: v for name, v in holder.items()}
                holder.clear()
                holder.update(renamed)
    fixed = fix_table(("\ufeff" + json.dumps(value)).encode(), "t.json")
    assert fixed.value == good
    assert len(fixed.repairs) >= 1
    assert fix_table(json.dumps(fixed.value).encode()).repairs == ()


HEAD = '"version": "1.0", "status": "completed", "server_count": "1"'
DEVICE = '"device_id": "0", "rank_id": "0"'


def text_of(head=HEAD, server='"server_id": "a"', device=DEVICE, name="server_list"):
    return f'{{{head}, "{name}": [{{{server}, "device": [{{{device}}}]}}]}}'


@pytest.mark.parametrize(
    ("text", "repairs"),
    [
        (text_of(), []),
        (text_of(device=f'{DEVICE}, "my_key": " x ", "device_ip": null, "device_port": true'), []),
        (text_of(device=f'{DEVICE}, "backup_device_id": "1", "rank": "0"'), []),
        (text_of(device=f'{DEVICE}, "device_port": 16666'),
         ['R4 server_list[0].device[0].device_port: 16666 -> "16666"']),
        (text_of(device=f'{DEVICE}, "device_ip": "10.0.0.1, 10.0.0.2 "'),
         ['R13 server_list[0].device[0].device_ip: "10.0.0.1, 10.0.0.2 " -> "10.0.0.1,10.0.0.2"']),
        (text_of(device='"devcie_id": "0", "rankId": "0"'),
         ["R31 server_list[0].device[0].devcie_id: renamed to 'device_id'",
          "R31 server_list[0].device[0].rankId: renamed to 'rank_id'"]),
        (text_of(server='"server_id": "a", "hostIP": "10.0.0.1"'), ["R31 server_list[0].hostIP: renamed to 'host_ip'"]),
        (text_of('"version": 1.0, "status": "completed", "server_count": 3'),
         ['R4 version: 1.0 -> "1.0"', 'R4 server_count: 3 -> "3"',
          'R6 server_count: "3" -> "1", as many as are listed']),
        (text_of('"version": "1.0", "status": "completed"'), ['R5 server_count: added "1"']),
        (text_of(name="sever_list"), ["R31 sever_list: renamed to 'server_list'"]),
        (BAD, ["R1 line 1: , -> taken out", "R31 server_list[0].serverId: renamed to 'server_id'",
               'R5 server_count: added "1"']),
        (text_of(device='"device_id": 0, "rank_id": "00"'),
         ['R4 server_list[0].device[0].device_id: 0 -> "0"', 'R9 server_list[0].device[0].rank_id: "00" -> "0"']),
        ((CATALOGUE / "v2_0" / "rank_count.json").read_text(),
         ["R30 rank_count: 4 -> 2, as many as are listed"]),
        ((CATALOGUE.parent / "changes/cloud.json").read_text().replace('instance_count": "1', 'instance_count": "9'),
         ['R28 group_list[0].instance_count: "9" -> "1", as many as are listed']),
    ],
)  # fmt: skip
def test_each_repair_says_rule_place_and_change(text, repairs):
    value, found = fix_text(text)
    assert found == repairs
    assert fix_text(json.dumps(value))[1] == []


def test_ids_addresses_versions_and_status_are_never_made_up():
    text = '{"status": "initializing", "server_list": [{"server_id": "", "device": [{"rank_id": "7"}]}]}'
    value, repairs = fix_text(text)
    assert repairs == ['R5 server_count: added "1"']
    del value["server_count"]
    assert value == json.loads(text)


def test_a_key_that_stands_twice_is_for_a_person():
    with pytest.raises(InvalidTableError, match=r"server_list\[0\].device\[0\].device_id: the key stands twice"):
        fix_text(text_of(device=f'{DEVICE}, "device_id": "1"'))
    with pytest.raises(InvalidTableError, match="1 more"):
        fix_text(text_of(f'{HEAD}, "x": 1, "x": 1', device=f'{DEVICE}, "device_id": 0'))


def test_the_command_writes_lists_and_validates(run):
    Path("bad.json").write_text(BAD)
    status, out, err = run("validate", "--fix", "bad.json", "-o", "good.json", "--device_target", "cpu")
    assert status == 0
    assert out.startswith("good.json: valid")
    assert err.splitlines() == [
        "ranktable: repaired R1 line 1: , -> taken out",
        'ranktable: repaired R5 server_count: added "1"',
        "ranktable: repaired R31 server_list[0].serverId: renamed to 'server_id'",
        "ranktable: wrote good.json",
    ]
    assert Path("bad.json").read_text() == BAD
    assert validate_file("good.json", device_target="cpu").problems == ()


def test_in_place_keeps_the_mode_and_the_link(run):
    Path("real.json").write_text(BAD)
    Path("real.json").chmod(0o640)
    Path("link.json").symlink_to("real.json")
    assert run("validate", "--fix", "link.json", "--in_place", "--device_target", "cpu")[0] == 0
    assert Path("link.json").is_symlink()
    assert Path("real.json").stat().st_mode & 0o777 == 0o640
    assert json.loads(Path("real.json").read_text())["server_count"] == "1"


def test_what_is_left_for_a_person_is_written_and_listed(run):
    Path("t.json").write_text(BAD.replace('"a"', '"10.*.*.*"').replace("completed", "initializing"))
    status, out, err = run("validate", "--fix", "t.json", "-o", "-")
    assert status == 3
    assert json.loads(out)["status"] == "initializing"
    assert "the status is left as it is: only the producer" in err
    Path("t.json").write_text(BAD.replace('"a"', '"10.*.*.*"'))
    status, out, err = run("validate", "--fix", "t.json", "-o", "-")
    assert status == 1
    assert 'error R7 server_list[0].server_id = "10.*.*.*"' in err
    assert json.loads(out)["server_count"] == "1"


GROUP = (
    '{"group_name": "01", "instance_list": [{"pod_name": "%s", "server_id": "10.0.0.%s", "devices": '
    '[{"device_id": "0", "device_ip": "192.168.0.%s"}]}]}'
)
SERVICE = (
    '{"group_id": "02", "server_count": "1", "server_list": [{"server_id": "10.0.0.%s", "server_ip": "10.0.0.%s", '
    '"device": [{"device_id": "0", "device_ip": "192.168.0.%s", "rank_id": "0"}]}]}'
)


def test_an_id_that_stands_twice_is_for_a_person():
    value, _ = fix_text(f'{{"status": "completed", "group_list": [{GROUP % ("a", 1, 1)}, {GROUP % ("b", 2, 2)}]}}')
    assert [group["group_name"] for group in value["group_list"]] == ["01", "01"]
    head = '{"version": "1.0", "status": "completed", "server_group_list": '
    value, _ = fix_text(f"{head}[{SERVICE % (1, 1, 1)}, {SERVICE % (2, 2, 2)}]}}")
    assert [group["group_id"] for group in value["server_group_list"]] == ["02", "02"]


def test_a_preview_shows_what_would_change_and_writes_nothing(run):
    Path("bad.json").write_text(BAD)
    status, out, err = run("validate", "--fix", "bad.json", "--device_target", "cpu")
    assert status == 0
    assert "--- bad.json\n+++ bad.json (repaired)\n" in out
    assert '"server_id": "a"' in out
    assert "nothing is written; give --in_place, or -o OUT" in err
    assert [path.name for path in Path().iterdir()] == ["bad.json"]
    assert Path("bad.json").read_text() == BAD


def test_a_table_in_which_nothing_can_be_repaired_is_copied_only_if_it_is_valid(run):
    Path("good.json").write_text(encode_table(build_table([("a", 8)])))
    assert run("validate", "--fix", "good.json", "-o", "copy.json", "--device_target", "cpu")[0] == 0
    assert Path("copy.json").read_text() == Path("good.json").read_text()
    Path("wrong.json").write_text(encode_table(build_table([("a", 8)])).replace('"a"', '"10.*.*.*"'))
    status, _, err = run("validate", "--fix", "wrong.json", "-o", "other.json")
    assert status == 1
    assert "other.json is not written: nothing in wrong.json can be repaired mechanically" in err
    assert not Path("other.json").exists()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("a1'\"\\/#*,]} \nTrue", max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab,'#/*]", max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.sampled_from([None, 2]))
def test_json_is_read_as_the_strict_reader_reads_it(value, indent):
    text = json.dumps(value, indent=indent)
    assert repair_text(text) == (text, [])
    document, repairs = parse_leniently(text.encode())
    assert (document.value, repairs) == (parse_document(text.encode()).value, [])


def write_by_hand(value):
    """Return JSON with a comma after every item and comments that look like JSON between them."""
    if isinstance(value, dict):
        members = (f"{json.dumps(k)}: {write_by_hand(v)}, // it's, \"\n" for k, v in value.items())
        return f"{{ /* }} */{''.join(members)}}}"
    if isinstance(value, list):
        return "[# ],\n" + "".join(f"{write_by_hand(item)} /* , */ ,\n" for item in value) + " ]"
    return json.dumps(value)


@settings(deadline=None, max_examples=100)
@given(VALUES)
def test_comments_and_last_commas_change_no_value(value):
    text = write_by_hand({"key": value})
    document, repairs = parse_leniently(text.encode())
    assert document.value == {"key": value}
    assert document.text.count("\n") == text.count("\n")
    assert all(repair.change.endswith("-> taken out") for repair in repairs)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2, ], }', {"a": [1, 2]}),
        ('# top\n{"a": "http://x/#y", "b": "/* kept */"}', {"a": "http://x/#y", "b": "/* kept */"}),
        ("{'a': 'it\\'s \"b\"', 'c': True, 'd': None}", {"a": 'it\'s "b"', "c": True, "d": None}),
        ('{"a": "True, None, \'b\',}"}', {"a": "True, None, 'b',}"}),
        ('\ufeff{"a": 1,}', {"a": 1}),
    ],
)
def test_what_hands_do_to_json_is_repaired(text, value):
    document, repairs = parse_leniently(text.encode())
    assert document.value == value
    assert bool(repairs) == (not text.startswith('{"a": "True'))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{// one\n"a": [{}, ...]}', "2:11: an elision"),
        ('{"a": 1 "b": 2}', "a comma or a closing bracket is missing"),
        ('{"a": [1,,]}', "1:10: "),
        ("{'a': 'b}", "quotation mark"),
        ('{"a": 1 /* never closed', "comment"),
        ("\xff", "not UTF-8"),
    ],
)
def test_what_a_person_must_say_is_refused_at_its_place(text, says):
    with pytest.raises(JsonTextError, match=says.replace(".", r"\.")):
        parse_leniently(text.encode("latin-1"))


@pytest.mark.parametrize("unit", one_fast("//", '"\\', "'\\'", ",/*", ",  ", "/*", "'", ",#"))
def test_hostile_text_is_read_in_linear_time(unit):
    with pytest.raises(JsonTextError):
        parse_leniently((unit * 100_000).encode())
