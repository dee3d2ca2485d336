"""Private files, no link followed, and an event log that survives a full disk."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from msrun.agent.logs.own_file import create_own_file
from msrun.launch.directory.log_directory import EventLog, write_private


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        os.close(create_own_file(tmp_path / "log"))
        write_private(tmp_path / "plan.json", "{}")
    finally:
        os.umask(before)
    assert (mode_of(tmp_path / "log"), mode_of(tmp_path / "plan.json")) == (0o600, 0o600)


def test_file_of_an_earlier_job_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("old")
    os.close(create_own_file(tmp_path / "log"))
    assert (tmp_path / "log").read_text() == ""


def test_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "log").symlink_to(tmp_path / "target")
    os.close(create_own_file(tmp_path / "log"))
    assert not (tmp_path / "log").is_symlink()
    assert (tmp_path / "target").read_text() == "kept"


def test_whole_file_is_moved_into_place_over_a_link_and_leaves_no_temporary_one(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "plan.json").symlink_to(tmp_path / "target")
    write_private(tmp_path / "plan.json", "new \udcff")
    assert (tmp_path / "plan.json").read_bytes() == b"new \xff"
    assert (tmp_path / "target").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["plan.json", "target"]


def test_file_that_cannot_be_moved_into_place_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_private(tmp_path / "plan.json", "{}")
    assert os.listdir(tmp_path) == ["plan.json"]


def test_events_are_lines_of_json_with_both_clocks(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.note("started", {"global_rank": 0, "pid": 5})
    log.note("over", {"reason": "☃"})
    first, second = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    log.close()
    assert (first["event"], first["pid"], second["reason"]) == ("started", 5, "☃")
    assert second["job_s"] >= first["job_s"] >= 0
    assert first["time"] > 1e9


def test_events_on_a_full_disk_are_no_error(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), log._file.fileno())
    log.note("over", {"reason": "r"})
    log.close()
