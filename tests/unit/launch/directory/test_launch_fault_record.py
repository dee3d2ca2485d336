"""The traceback of a fault of msrun itself is kept in scheduler.log, and cannot command a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from msrun.launch.directory.log_directory import record_fault


def test_fault_is_added_to_the_record_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "scheduler.log").write_text("job J\n")
    record_fault(tmp_path, "h1: msrun itself failed: KeyError", "Traceback:\n  \x1b[2Jhere\n\n")
    text = (tmp_path / "scheduler.log").read_text()
    assert re.fullmatch(
        r"job J\n\d{4}-\d\d-\d\d \d\d:\d\d:\d\d h1: msrun itself failed: KeyError\nTraceback:\n  here\n", text
    )


def test_fault_is_said_where_there_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_fault(tmp_path / "gone", "msrun itself failed: KeyError", "Traceback:\n")
    assert capsys.readouterr().err.endswith("msrun itself failed: KeyError\nTraceback:\n")
