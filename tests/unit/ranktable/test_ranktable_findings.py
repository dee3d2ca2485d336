"""Findings as text and as JSON: order, repeats, what is said of the kind of table, what --quiet leaves out."""

import json
import re
from pathlib import Path

import pytest

from ranktable.cli import main

CATALOGUE = Path(__file__).parent / "catalogue" / "concise"

MIXED = """{"version": "1.0", "server_count": "1", "note": "x", "status": "completed", "server_list": [
  {"server_id": "10.0.0.1", "rack": "7", "device": [{"device_id": "0", "device_ip": "0.0.0.0", "rank_id": "0"}]}]}
"""


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run `ranktable validate` in a folder that holds mixed.json; return exit status and standard output."""
    monkeypatch.chdir(tmp_path)
    Path("mixed.json").write_text(MIXED)

    def call(*arguments):
        return main(["validate", *map(str, arguments)]), capsys.readouterr().out

    return call


def test_errors_come_before_warnings(run):
    status, out = run("mixed.json")
    assert status == 1
    assert [line.split(": ")[1][:7] for line in out.splitlines() if line.startswith("mixed.json:")][:3] == [
        "error R",
        "warning",
        "warning",
    ]
    assert out.index("R13") < out.index("R31")


def test_the_kind_of_table_is_said_with_its_evidence_where_there_are_problems(run):
    assert "mixed.json: taken for a version 1.0 rank table because it has server_list\n" in run("mixed.json")[1]
    assert run(CATALOGUE / "good_16pcs.json")[1].count("\n") == 1
    assert "taken for" not in run(CATALOGUE / "trailing_comma.json")[1]


def test_quiet_leaves_out_warnings_and_files_that_pass(run):
    status, out = run("--quiet", CATALOGUE / "good_16pcs.json", CATALOGUE / "numeric_order.json", "mixed.json")
    assert status == 1
    assert "warning R" not in out
    assert "good_16pcs" not in out
    assert "numeric_order" not in out
    assert "mixed.json: 1 error, 2 warnings" in out


def test_quiet_keeps_what_strict_counts(run):
    status, out = run("--quiet", "--strict", CATALOGUE / "numeric_order.json")
    assert status == 1
    assert "warning R11" in out
    assert run("--quiet", CATALOGUE / "numeric_order.json") == (0, "")


def test_quiet_keeps_files_that_are_not_ready_or_not_readable(run):
    assert "not ready" in run("--quiet", CATALOGUE / "initializing.json")[1]
    assert "cannot read missing.json" in run("--quiet", "missing.json", "mixed.json")[1]


def test_json_has_the_evidence(run):
    mixed, good, broken = json.loads(
        run("--format", "json", "mixed.json", CATALOGUE / "good_16pcs.json", CATALOGUE / "comments.json")[1]
    )
    assert (mixed["dialect"], mixed["evidence"], mixed["errors"], mixed["warnings"]) == ("1.0", "server_list", 1, 2)
    assert (good["evidence"], good["problems"]) == ("server_list", [])
    assert (broken["dialect"], broken["evidence"]) == (None, None)


def test_a_file_name_cannot_break_a_line(run):
    Path("a\nb.json").write_text(MIXED)
    _, out = run("a\nb.json")
    assert all(line.startswith(('"a\\nb.json":', '"a\\nb.json": ', "    remedy: ")) for line in out.splitlines())


def test_a_flood_of_faults_is_counted_and_not_listed(run):
    entries = ",".join(["1"] * 500)
    keys = ",".join(f'"key{number}": 1' for number in range(500))
    Path("flood.json").write_text(f'{{"version": "1.0", "status": "completed", {keys}, "server_list": [{entries}]}}')
    _, out = run("--format", "json", "flood.json")
    messages = [problem["message"] for problem in json.loads(out)[0]["problems"]]
    assert messages.count("the value must be an object") == 100
    assert "400 more items of the array are not an object" in messages
    assert "400 more keys of the object are not known and will be ignored" in messages


def test_a_key_that_is_as_long_as_the_file_does_not_flood_the_screen(run):
    key = "k" * 100_000
    Path("long.json").write_text(f'{{"version": "1.0", "status": "completed", "{key}": 1, "server_list": []}}')
    status, out = run("long.json")
    assert status == 1
    assert len(out) < 2000
    Path("long.json").write_text(f'{{"{key}\\n": 1}}')
    assert len(run("long.json")[1]) < 2000


def test_an_odd_key_cannot_break_the_line_of_an_error(run, capsys):
    Path("odd.json").write_text('{"two\\nlines": 1, "\\u001b[31m": 2}')
    assert main(["show", "odd.json"]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(r"ranktable: error: odd.json .*two\\nlines.*u001b\[31m.*\n", error)
