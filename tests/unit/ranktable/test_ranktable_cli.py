"""The command: what generate, validate and show write, print and say, with which exit status; and what it loads."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from file_tree import grow
from hypothesis import given, settings
from hypothesis import strategies as st

import ranktable
from ranktable import Device, RankTable, Server, SuperPod, build_table, read_table, write_table
from ranktable.errors import BuildError, UnknownDialectError
from ranktable.kinds import find_near_keys
from ranktable.report import list_ranks, overview_as_json, render_overview, render_rank
from ranktable.tables import encode_table

CATALOGUE = Path(__file__).parent / "catalogue" / "concise"


def test_generate_writes_the_default_file_and_says_so(run):
    status, out, err = run("generate", "--hosts", "node[1-2]:4")
    assert (status, out) == (0, "")
    assert Path("rank_table_8pcs.json").read_text() == encode_table(build_table([("node1", 4), ("node2", 4)]))
    assert "wrote rank_table_8pcs.json: 2 servers, 8 devices" in err
    assert run("generate", "--hosts", "node[1-2]:4")[0] == 2
    assert run("generate", "--hosts", "node[1-2]:4", "--force")[0] == 0
    assert Path("rank_table_8pcs.json").stat().st_mode & 0o777 == 0o644
    assert "ranks follow the string order of the server ids; rank 0 is on node1" in err


def test_generate_prints_to_standard_output(run):
    status, out, err = run("generate", "--hosts", "10.0.0.9:1,10.0.0.10:1", "--order", "given", "-o", "-")
    assert status == 0
    assert [server["server_id"] for server in json.loads(out)["server_list"]] == ["10.0.0.9", "10.0.0.10"]
    assert "Ascend readers demand --order server_id" in err


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["numeric_order.json"], 0),
        (["--strict", "numeric_order.json"], 1),
        (["initializing.json"], 3),
        (["missing.json"], 2),
        (["initializing.json", "tutorial_8pcs.json"], 1),
        (["tutorial_8pcs.json", "missing.json", "good_16pcs.json"], 2),
        (["--device-target", "cpu", "ascend_two_hosts_without_ips.json"], 0),
    ],
)
def test_the_exit_status_tells_the_result(run, monkeypatch, arguments, status):
    monkeypatch.chdir(CATALOGUE)
    assert run("validate", *arguments)[0] == status


def test_json_lists_every_problem_of_every_file(run, monkeypatch):
    monkeypatch.chdir(CATALOGUE)
    names = ("tutorial_8pcs.json", "missing.json", "initializing.json", "numeric_order.json", "comments.json")
    status, out, err = run("validate", "--format", "json", *names)
    assert (status, err) == (2, "")
    first, second, third, warned, broken = json.loads(out)
    assert (first["dialect"], first["evidence"], first["errors"], first["warnings"]) == ("1.0", "server_list", 1, 0)
    assert (warned["errors"], warned["warnings"], len(warned["problems"])) == (0, 1, 1)
    assert (broken["dialect"], broken["evidence"]) == (None, None)
    assert first["problems"][0] == {
        "path": "server_list[0].server_id",
        "line": 6,
        "column": 7,
        "rule": "R7",
        "severity": "error",
        "value": '"10.*.*.*"',
        "message": "the id is a mask, not the address or name of a host",
        "remedy": "write the address or name of this host",
    }
    assert "no such file" in second["error"]
    assert third["ready"] is False


def test_a_file_without_its_suffix_is_refused_for_ascend_only(run):
    run("generate", "--hosts", "a:1", "-o", "table")
    assert "R1 the file: the file name does not end in .json" in run("validate", "table")[1]
    assert run("validate", "--device_target", "cpu", "table")[0] == 0


HOSTS = ["generate", "-o", "-", "--hosts", "a:1"]
IN_PODS = [*HOSTS, "--version", "1.2", "--super_pods"]
MISTAKES = [
    ([], "Missing command. (see ranktable --help)"),
    (["generate", "--hosts", "a"], "host 'a' has no number of devices; write a:8, or give --devices"),
    (["generate", "--hosts", "a:8", "--devices", "0-3"], "--devices lists 4; leave one out"),
    (["generate", "--hosts", "a:8", "--device_ips", "{x}"], "unknown field"),
    (["generate", "--hosts", "a:8", "--device_ips", "10.{device-1}"], "unknown field"),
    (["generate", "--hosts", "a:8", "--device_ips", "10.{server.1"], "unknown field"),
    (["generate", "--hosts", "a:8", "--device_ips", "none.yaml"], "cannot read none.yaml"),
    (["generate", "--probe", "--device_ips", "x"], "--probe and --device_ips both give the addresses"),
    ([*HOSTS, "--probe"], "--hosts and --probe both name the hosts"),
    (["generate"], "no source of hosts is named"),
    (["generate", "--hostfile", "none"], "cannot read none"),
    ([*HOSTS, "--super_pods", "0=a"], "super pods are part of version 1.2"),
    ([*IN_PODS, "a"], "'a' has no id before its hosts"),
    ([*IN_PODS, "0=a;0=b"], "super pod '0' is given twice"),
    ([*IN_PODS, "0=a:8"], "'a' has slots or a user here"),
    ([*HOSTS, "--root", "x"], "--root and --server_id go with --probe"),
    (["generate", "--hosts", "a:1,b:1", "--chip", "a2"], "(R16 for a2"),
    (["validate", "--formt", "json", "x"], "Did you mean one of: '--format'"),
    (["validate", "--fix", "t.json", "-o", "a", "--in_place"], "leave one of them out"),
    (["validate", "t.json", "-o", "a"], "go with --fix"),
    (["validate", "--fix", "t.json", "bad.json"], "--fix takes one FILE, not 2"),
    (["validate", "--fix", "-", "--in_place"], "not standard input"),
    (["validate", "t.json", "--root", "x"], "--root goes with --local"),
    (["validate", "--local", "--fix", "t.json"], "give one of the two"),
    (["validate", "--local", "t.json", "u.json"], "--local takes one FILE, not 2"),
    (["validate", "--local"], "name the file that the job reads, or set RANK_TABLE_FILE"),
    (["show", "missing\x1b[31m.json"], "missing\\x1b[31m.json"),
    (["shwo"], "No such command 'shwo'"),
    (
        ["convert", "t.json", "--to", "hostfile", "--super_pods", "0=a"],
        "--super_pods means nothing to hostfile, only to",
    ),
    (["convert", "t.json", "--to", "2.0"], "'2.0' is not one of '1.0', '1.2', 'hostfile'"),
    (["convert", "t.json", "--to", "1.2", "--super_pods", "a"], "has no id before its hosts"),
    (["convert", "t.json", "--to", "hostfile", "-o", "no/where"], "create the folder no first"),
    (["merge", "none.json"], "cannot read none.json"),
    (["merge", "t.json", "--order", "rank"], "'rank' is not one of"),
    (["merge", "t.json", "-o", "no/m.json"], "create the folder no first"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES)
def test_a_mistake_of_the_user_is_one_line(run, monkeypatch, arguments, says):
    monkeypatch.delenv("RANK_TABLE_FILE", raising=False)
    for name in ("t.json", "bad.json", "u.json"):
        Path(name).write_text(encode_table(build_table([("a", 2), ("b", 2)])))
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("ranktable: error: ") and err.count("\n") == 1
    assert says in err


def test_help_is_printed(run):
    for command in ([], ["generate"], ["validate"], ["show"]):
        status, out, err = run(*command, "--help")
        assert (status, err) == (0, "") and "Usage: ranktable" in out


@pytest.fixture
def generate(run, tmp_path, monkeypatch):
    """Run `ranktable generate` to standard output in an empty folder, without tools."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return lambda *arguments: run("generate", *arguments, "-o", "-")


def devices_of(out):
    """Return (server id, device id, device ip, rank) of the printed table."""
    return [
        (server["server_id"], int(device["device_id"]), device.get("device_ip"), int(device["rank_id"]))
        for server in json.loads(out)["server_list"]
        for device in server["device"]
    ]


def test_a_host_file_gives_hosts_and_slots(generate, monkeypatch):
    Path("hosts").write_text("b slots=2\na slots=1\n")
    status, out, _ = generate("--hostfile", "hosts")
    assert status == 0
    assert devices_of(out) == [("a", 0, None, 0), ("b", 0, None, 1), ("b", 1, None, 2)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a slots=1\na slots=1\n")))
    status, out, _ = generate("--hostfile", "-", "--hostfile_format", "openmpi")
    assert [device[1] for device in devices_of(out)] == [0, 1]


def test_hosts_are_filtered_and_keep_the_addresses_of_the_whole_list(generate):
    options = ("--hosts", "a:2,b:2,c:2", "--device_ips", "10.1.{server+10}.{device+1}")
    _, out, _ = generate(*options, "--include", "b:1@c")
    assert devices_of(out) == [("b", 1, "10.1.11.2", 0), ("c", 0, "10.1.12.1", 1), ("c", 1, "10.1.12.2", 2)]
    _, out, _ = generate(*options, "--exclude", "a@b:1@c:0")
    assert devices_of(out) == [("b", 0, "10.1.11.1", 0), ("c", 1, "10.1.12.2", 1)]


def test_super_pods_are_given_by_hand(generate):
    Path("sdids.yaml").write_text("a: [0]\nb: ['65537']\n")
    options = ("--version", "1.2", "--super_device_ids", "sdids.yaml")
    _, out, _ = generate("--hosts", "a:1,b:1", *options, "--super_pods", "0=a;1=b")
    table = json.loads(out)
    assert [pod["super_pod_id"] for pod in table["super_pod_list"]] == ["0", "1"]
    assert [server["device"][0]["super_device_id"] for server in table["server_list"]] == ["0", "65537"]
    assert generate("--hosts", "a:1,b:1", *options, "--super_pods", "0=a", "--super_pods", "1=b")[1] == out
    _, out, _ = generate("--hosts", "a:1,b:1", *options, "--super_pods", "0=b", "--exclude", "a")
    assert [server["server_id"] for server in json.loads(out)["server_list"]] == ["b"]


def test_this_host_is_probed_below_a_root(generate):
    addresses = "address_3=192.168.1.3\naddress_0=192.168.1.1\n"
    grow(Path("host"), {"dev/davinci3": "", "etc/hccn.conf": addresses})
    status, out, err = generate("--probe", "--root", "host", "--server_id", "node7")
    assert status == 0
    assert devices_of(out) == [("node7", 3, "192.168.1.3", 0)]
    assert "asked this host: ascend, 1 device" in err
    Path("host/dev/davinci3").unlink()
    _, out, err = generate("--probe", "--root", "host", "--devices", "0-1", "--server_id", "node7")
    assert devices_of(out) == [("node7", 0, None, 0), ("node7", 1, None, 1)]
    assert "asked this host: cpu, 2 devices" in err


def test_what_only_ascend_would_refuse_is_said_when_no_target_is_named(generate):
    status, _, err = generate("--hosts", "a:40")
    assert status == 0
    assert "error on Ascend: R8 server_list[0].device[32].device_id" in err
    assert generate("--hosts", "a:40", "--device_target", "cpu")[2] == ""
    assert generate("--hosts", "a:40", "--device_target", "ascend")[0] == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [x]", 'server_list[0].device[0].super_device_id = "x": the id is no decimal'),
        ("a: [1, 2]", "server 'a' has 1 device, but 2 super device ids for them"),
        ("b: [1]", "a super device id is given for 'b', which is not one of the servers"),
        ("[]", "SDIDs"),
    ],
)
def test_numbers_of_devices_that_do_not_fit_are_refused(generate, text, says):
    Path("sdids.yaml").write_text(text)
    status, _, err = generate(
        "--hosts", "a:1", "--version", "1.2", "--super_device_ids", "sdids.yaml", "--super_pods", "0=a"
    )
    assert status == 2
    assert says in err


MIXED = """{"version": "1.0", "server_count": "1", "note": "x", "status": "completed", "server_list": [
  {"server_id": "10.0.0.1", "rack": "7", "device": [{"device_id": "0", "device_ip": "0.0.0.0", "rank_id": "0"}]}]}
"""


@pytest.fixture
def validate(run, tmp_path):
    """Run `ranktable validate` in a folder that holds mixed.json; return exit status and standard output."""
    (tmp_path / "mixed.json").write_text(MIXED)
    return lambda *arguments: run("validate", *arguments)[:2]


def test_errors_come_before_warnings(validate):
    lines = [line for line in validate("mixed.json")[1].splitlines() if line.startswith("mixed.json:")]
    assert [line.split(": ")[1].split()[0] for line in lines[:3]] == ["error", "warning", "warning"]


def test_the_kind_of_table_is_said_with_its_evidence_where_there_are_problems(validate):
    assert "mixed.json: taken for a version 1.0 rank table because it has server_list\n" in validate("mixed.json")[1]
    assert validate(CATALOGUE / "good_16pcs.json")[1].count("\n") == 1
    assert "taken for" not in validate(CATALOGUE / "trailing_comma.json")[1]


def test_quiet_leaves_out_what_passes_and_keeps_what_strict_counts_and_what_is_not_ready_or_readable(validate):
    status, out = validate("--quiet", CATALOGUE / "good_16pcs.json", CATALOGUE / "numeric_order.json", "mixed.json")
    assert status == 1
    assert not any(word in out for word in ("warning R", "good_16pcs", "numeric_order"))
    assert "mixed.json: 1 error, 2 warnings" in out
    assert "warning R11" in validate("--quiet", "--strict", CATALOGUE / "numeric_order.json")[1]
    assert "not ready" in validate("--quiet", CATALOGUE / "initializing.json")[1]
    assert "cannot read missing.json" in validate("--quiet", "missing.json", "mixed.json")[1]


def test_a_file_name_cannot_break_a_line(validate):
    Path("a\nb.json").write_text(MIXED)
    _, out = validate("a\nb.json")
    assert all(line.startswith(('"a\\nb.json":', '"a\\nb.json": ', "    remedy: ")) for line in out.splitlines())


def test_a_flood_of_faults_is_counted_and_not_listed(validate):
    entries = ",".join(["1"] * 500)
    keys = ",".join(f'"key{number}": 1' for number in range(500))
    Path("flood.json").write_text(f'{{"version": "1.0", "status": "completed", {keys}, "server_list": [{entries}]}}')
    _, out = validate("--format", "json", "flood.json")
    messages = [problem["message"] for problem in json.loads(out)[0]["problems"]]
    assert messages.count("the value must be an object") == 100
    assert "400 more items of the array are not an object" in messages
    assert "400 more keys of the object are not known and will be ignored" in messages


def test_a_key_that_is_as_long_as_the_file_does_not_flood_the_screen(validate):
    key = "k" * 100_000
    Path("long.json").write_text(f'{{"version": "1.0", "status": "completed", "{key}": 1, "server_list": []}}')
    status, out = validate("long.json")
    assert status == 1
    assert len(out) < 2000
    Path("long.json").write_text(f'{{"{key}\\n": 1}}')
    assert len(validate("long.json")[1]) < 2000


ROOT = Path(ranktable.__file__).parent


def test_the_module_runs_as_a_command():
    arguments = [sys.executable, "-m", "ranktable", "validate", "-"]
    done = subprocess.run(arguments, input=b"{", capture_output=True, check=False, cwd=ROOT.parent)
    assert done.returncode == 1
    assert b"ends in the middle of the table" in done.stdout


# -- what show prints: right for one rank, readable for 131,072; and what a file is that is no table, and why ---------


def test_a_line_per_server_in_the_order_of_rank():
    table = build_table([("b", 2), ("a", [4, 5])], device_ips={"b": ["10.0.0.1", "10.1.0.1"]}, order="given")
    assert render_overview(table).splitlines() == [
        "version 1.0, status completed, 2 servers, 4 devices",
        "",
        "server  ranks  devices  device_ip",
        "b       0-1    0-1      10.0.0.1, 10.1.0.1",
        "a       2-3    4-5      -, -",
    ]


def test_a_rank_is_described_with_all_that_is_known_of_it():
    server = Server("b", (Device(4, 2), Device(3, 1, "10.0.0.3", "77")), "172.0.0.1")
    table = RankTable("1.2", (server, Server("a", (Device(0, 0),))), super_pods=(SuperPod("5", ("b",)),))
    (found,) = list_ranks(table, 1)
    assert render_rank(found).splitlines() == [
        "rank_id          1",
        "server_id        b",
        "node_rank        1",
        "local_rank       0",
        "device_id        3",
        "device_ip        10.0.0.3",
        "super_device_id  77",
        "host_ip          172.0.0.1",
        "super_pod_id     5",
    ]
    with pytest.raises(BuildError, match="no device of the table has rank 9"):
        list_ranks(table, 9)


def test_ranks_that_start_again_in_every_group_are_all_told():
    servers = tuple(Server(name, (Device(0, 0),), group=name) for name in "ba")
    table = RankTable("mindie-global", servers)
    assert [row["server_id"] for row in list_ranks(table, 0)] == ["b", "a"]


def test_the_object_for_programs_has_every_server():
    servers = [Server(f"node{n}", (Device(0, 2 * n, f"10.0.0.{n}"), Device(1, 2 * n + 1))) for n in range(100)]
    value = overview_as_json(RankTable("1.2", tuple(servers), super_pods=(SuperPod("8", ("node50", "node99")),)))
    assert value["servers"][99] == {
        "server_id": "node99",
        "node_rank": 99,
        "ranks": [198, 199],
        "device_ids": [0, 1],
        "device_ips": ["10.0.0.99", None],
        "super_pod_id": "8",
        **dict.fromkeys(("host_ip", "pod_ip", "group")),
    }
    assert value["super_pods"] == [{"super_pod_id": "8", "servers": ["node50", "node99"]}]


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=12), st.none() | st.text(max_size=12))
def test_any_name_makes_lines(name, address):
    server = Server(name, (Device(0, 0, address),), host_ip=address)
    table = RankTable("1.2", (server,), status=name, super_pods=(SuperPod(name, (name,)),))
    for line in [*render_overview(table).split("\n"), *render_rank(list_ranks(table, 0)[0]).split("\n")]:
        assert line.isascii()
        assert line.isprintable()


def test_a_table_without_servers_is_a_heading():
    assert render_overview(RankTable("1.0", ())) == "version 1.0, status completed, 0 servers, 0 devices"


@pytest.fixture
def show(run):
    def call(*arguments):
        if not Path("t.json").exists():
            write_table("t.json", build_table([("a", 2), ("b", 2)]))
        return run("show", "t.json", *arguments)

    return call


def test_the_command_prints_servers_ranks_one_rank_or_json(show):
    assert show()[1].splitlines()[-1] == "b       2-3    0-1"
    assert show("--ranks")[1].splitlines()[-1].split() == ["3", "b", "1", "-"]
    assert "server_id   b\n" in show("--rank", "3")[1]
    assert json.loads(show("--format", "json")[1])["world_size"] == 4
    assert [place["rank_id"] for place in json.loads(show("--ranks", "--format", "json")[1])] == [*range(4)]
    status, out, err = show("--rank", "0", "--ranks")
    assert (status, out, err.count("\n")) == (2, "", 1) and "exclude each other" in err


def test_a_table_in_the_making_is_shown_as_far_as_it_can_be_read(show):
    show()
    Path("t.json").write_text(Path("t.json").read_text().replace("completed", "initializing"))
    status, out, _ = show()
    assert (status, out.splitlines()[0]) == (0, "version 1.0, status initializing, 2 servers, 4 devices")
    Path("t.json").write_text('{"version": "1.0", "status": "initializing", "server_list": []}')
    assert show()[0] == 3


def test_show_says_what_is_known_of_a_file_that_is_no_table_of_a_job(run):
    status, out, err = run("show", CATALOGUE.parent / "not_hccl" / "tor_list.json")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].endswith("tor_list.json: a TOR list")
    assert out.splitlines()[1:] == [
        "    dialect:  tor-list",
        "    evidence: tor_ip in its devices and no rank_id",
        "    consumer: ModelArts, beside jobstart_hccl.json",
        "    advice:   it names switches, not ranks: use the file jobstart_hccl.json that stands beside it",
    ]
    status, out, _ = run("show", "--format", "json", CATALOGUE.parent / "not_hccl" / "roles.json")
    assert (status, json.loads(out)["dialect"]) == (0, "roles")


def test_show_refuses_what_is_nothing_that_is_known(run):
    status, _, err = run("show", CATALOGUE.parent / "not_hccl" / "near_miss.json")
    assert status == 1
    assert "rename 'serverList' to 'server_list', 'serverCount' to 'server_count'" in err


def test_misspelt_keys_are_looked_for_among_the_first_and_short_ones():
    near = find_near_keys(dict.fromkeys([f"x{number}" for number in range(98)] + ["serverlist", "y", "grouplist"]))
    assert near == {"serverlist": "server_list"}
    assert find_near_keys({"s" * 65: 1, "rankList": 1}) == {"rankList": "rank_list"}


def test_no_more_than_six_renames_are_proposed(tmp_path):
    path = tmp_path / "strange.json"
    path.write_text(json.dumps({f"serverlist{number}": 0 for number in range(9)}))
    with pytest.raises(UnknownDialectError) as caught:
        read_table(path)
    assert str(caught.value).count("to 'server_list'") == 6
