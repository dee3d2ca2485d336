"""The command: what it prints, where, and with which exit status."""

import importlib.metadata
import io
import json
import sys
from pathlib import Path

import pytest

from ranktable.generate import build_table
from ranktable.tables import encode_table

CATALOGUE = Path(__file__).parent / "catalogue" / "concise"


def test_generate_writes_the_default_file_and_says_so(run):
    status, out, err = run("generate", "--hosts", "node[1-2]:4")
    assert (status, out) == (0, "")
    assert Path("rank_table_8pcs.json").read_text() == encode_table(build_table([("node1", 4), ("node2", 4)]))
    assert "wrote rank_table_8pcs.json: 2 servers, 8 devices" in err
    assert "ranks follow the string order of the server ids; rank 0 is on node1" in err


def test_generate_prints_to_standard_output(run):
    status, out, err = run("generate", "--hosts", "10.0.0.9:1,10.0.0.10:1", "--order", "given", "-o", "-")
    assert status == 0
    assert [server["server_id"] for server in json.loads(out)["server_list"]] == ["10.0.0.9", "10.0.0.10"]
    assert "Ascend readers demand --order server_id" in err


def test_what_generate_writes_is_valid_and_shown(run):
    run("generate", "--hosts", "node[01-02]:2", "-o", "t.json")
    status, out, err = run("validate", "--device_target", "cpu", "t.json")
    assert (status, err) == (0, "")
    assert out == "t.json: valid (version 1.0, 2 servers, 4 devices, checked for cpu)\n"
    status, out, _ = run("show", "--ranks", "t.json")
    assert status == 0
    assert out.splitlines() == [
        "version 1.0, status completed, 2 servers, 4 devices",
        "rank  server_id  device_id  device_ip",
        "0     node01     0          -",
        "1     node01     1          -",
        "2     node02     0          -",
        "3     node02     1          -",
    ]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["good_16pcs.json"], 0),
        (["tutorial_8pcs.json"], 1),
        (["numeric_order.json"], 0),
        (["--strict", "numeric_order.json"], 1),
        (["initializing.json"], 3),
        (["trailing_comma.json"], 1),
        (["missing.json"], 2),
        (["initializing.json", "good_16pcs.json"], 3),
        (["initializing.json", "tutorial_8pcs.json"], 1),
        (["tutorial_8pcs.json", "missing.json", "good_16pcs.json"], 2),
        (["--chip", "910a", "good_16pcs.json"], 0),
        (["--device-target", "cpu", "ascend_two_hosts_without_ips.json"], 0),
    ],
)
def test_the_exit_status_tells_the_result(run, monkeypatch, arguments, status):
    monkeypatch.chdir(CATALOGUE)
    assert run("validate", *arguments)[0] == status


def test_problems_are_printed_with_place_rule_value_and_remedy(run, monkeypatch):
    monkeypatch.chdir(CATALOGUE)
    _, out, _ = run("validate", "tutorial_16pcs.json")
    lines = out.splitlines()
    assert lines[0] == (
        'tutorial_16pcs.json:6:7: error R7 server_list[0].server_id = "10.*.*.*": '
        "the id is a mask, not the address or name of a host"
    )
    assert "    remedy: write the address or name of this host" in lines
    assert lines[-1].startswith("tutorial_16pcs.json: 3 errors, 0 warnings (version 1.0, 2 servers, 16 devices")


def test_repeats_of_a_fault_are_counted(run):
    run("generate", "--hosts", "a:8,b:8", "-o", "t.json")
    status, out, _ = run("validate", "t.json")
    assert status == 1
    assert out.count(" R16 ") == 3
    assert "    and 13 more like this\n" in out


def test_json_lists_every_problem_of_every_file(run, monkeypatch):
    monkeypatch.chdir(CATALOGUE)
    status, out, err = run("validate", "--format", "json", "tutorial_8pcs.json", "missing.json", "initializing.json")
    assert (status, err) == (2, "")
    first, second, third = json.loads(out)
    assert first["errors"] == 1
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


def test_standard_input_is_validated(run, monkeypatch):
    text = encode_table(build_table([("a", 1)])).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    status, out, _ = run("validate", "--device_target", "gpu", "-")
    assert (status, out) == (0, "<stdin>: valid (version 1.0, 1 server, 1 device, checked for gpu)\n")


def test_a_file_without_its_suffix_is_refused_for_ascend_only(run):
    run("generate", "--hosts", "a:1", "-o", "table")
    assert "R1 the file: the file name does not end in .json" in run("validate", "table")[1]
    assert run("validate", "--device_target", "cpu", "table")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ([], 2, "Missing command. (see ranktable --help)"),
        (["generate"], 2, "no source of hosts is named; give one of --hosts, --hostfile"),
        (["generate", "--hosts", "a"], 2, "host 'a' has no number of devices; write a:8, or give --devices"),
        (["generate", "--hosts", "a:8", "--devices", "0-3"], 2, "--devices lists 4; leave one out"),
        (["generate", "--hosts", "a:8,a:8"], 2, "a is given twice"),
        (["generate", "--hosts", "a:8", "--order", "random"], 2, "random"),
        (["generate", "--hosts", "a:8", "--device_ips", "{x}"], 2, "unknown field"),
        (["generate", "--hosts", "a:8", "--device_ips", "none.yaml"], 2, "cannot read none.yaml"),
        (["generate", "--hosts", "a:8", "-o", "no/t.json"], 2, "create the folder no first"),
        (["validate"], 2, "Missing argument"),
        (["validate", "--formt", "json", "x"], 2, "Did you mean one of: '--format'"),
        (["validate", "."], 2, "it is a directory"),
        (["show", "missing\x1b[31m.json"], 2, "missing\\x1b[31m.json"),
        (["shwo"], 2, "No such command 'shwo'"),
    ],
)
def test_a_mistake_of_the_user_is_one_line(run, arguments, status, says):
    found, out, err = run(*arguments)
    assert (found, out) == (status, "")
    assert err.startswith("ranktable: error: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize("command", [[], ["generate"], ["validate"], ["show"]])
def test_help_is_printed(run, command):
    status, out, err = run(*command, "--help")
    assert (status, err) == (0, "")
    assert "Usage: ranktable" in out


def test_version_without_an_installation_is_said_to_be_unknown(run, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    status, out, err = run("--version")
    assert (status, out, err) == (0, "ranktable, version unknown: msrun is not installed, only on Python's path\n", "")


def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)
