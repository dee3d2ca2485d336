"""What workers write reaches a terminal as text, not as orders to it: in their lines, in the report, in the status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_runner import Finished, JobRunner

CLIPBOARD, DEVICE, CLEAR, C1, BIDI = "\x1b]52;c;SEVMTE8=\x07", "\x1bP+q544e\x1b\\", "\x1b[2J\x1b[H", "\x9b2J", "\u202e"
HOSTILE = CLIPBOARD + DEVICE + CLEAR + C1 + BIDI
ORDERS = (b"\x1b", b"\x07", "\x9b".encode(), BIDI.encode())
SCRIPT = f"""
import sys
sys.stdout.reconfigure(encoding="utf-8")
print("tail", {HOSTILE!r}, "end of tail")
raise ValueError({HOSTILE!r})
"""


@pytest.fixture(scope="module")
def failed(msrun_of_module: JobRunner, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    cwd = tmp_path_factory.mktemp("hostile")
    (cwd / "hostile.py").write_text(SCRIPT)
    return msrun_of_module.run("--worker_num=1", "--env=PYTHONUTF8=1", "hostile.py", cwd=cwd)


def test_lines_of_workers_are_shown_as_text(failed: Finished) -> None:
    assert b"end of tail" in failed.stdout
    assert [order for order in ORDERS if order in failed.stdout] == []


def test_the_report_is_text(failed: Finished) -> None:
    assert "ValueError" in failed.stderr
    assert [order for order in ORDERS if order in failed.stderr.encode()] == []


def test_the_log_holds_what_was_written(failed: Finished) -> None:
    assert HOSTILE.encode() in failed.log(0)


def test_raw_lines_are_those_of_the_worker(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(SCRIPT)
    shown = msrun.run("--worker_num=1", "--env=PYTHONUTF8=1", "--raw", "hostile.py", cwd=tmp_path).stdout
    assert HOSTILE.encode() in shown


def test_the_status_is_text(failed: Finished, msrun: JobRunner, tmp_path: Path) -> None:
    path = failed.log_dir / "failure.json"
    path.write_text(json.dumps({**failed.read_json("failure.json"), "reason": HOSTILE}))
    shown = msrun.run(f"--status={failed.log_dir}", cwd=tmp_path).stdout
    assert b"failed" in shown
    assert [order for order in ORDERS if order in shown] == []
