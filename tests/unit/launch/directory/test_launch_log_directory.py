"""Private files and no link followed, events that survive a full disk, and plan and events as others read them."""

import json
import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.agent.own_file import create_own_file, open_own_file
from msrun.launch.directory.log_directory import (
    EventLog,
    WorkerRecord,
    describe_removed,
    parse_events,
    parse_plan,
    read_bytes,
    record_fault,
    write_private,
)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_private_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        os.close(create_own_file(tmp_path / "log"))
        write_private(tmp_path / "plan.json", "{}")
    finally:
        os.umask(before)
    assert (mode_of(tmp_path / "log"), mode_of(tmp_path / "plan.json")) == (0o600, 0o600)


def test_file_of_an_earlier_job_is_emptied_and_a_link_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("kept")
    (tmp_path / "old").write_text("old")
    (tmp_path / "log").symlink_to(tmp_path / "target")
    for name in ("old", "log"):
        os.close(create_own_file(tmp_path / name))
        assert not (tmp_path / name).is_symlink() and (tmp_path / name).read_text() == ""
    assert (tmp_path / "target").read_text() == "kept"


def test_file_with_a_second_name_or_of_somebody_else_is_not_written(tmp_path, monkeypatch):
    (tmp_path / "log").touch()
    (tmp_path / "second").hardlink_to(tmp_path / "log")
    with pytest.raises(PermissionError, match="it has a second name, a hard link"):
        open_own_file(tmp_path / "log", os.O_WRONLY)
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((0o100600, 0, 0, 1, 4711, *[0] * 5)))
    with pytest.raises(PermissionError, match="it belongs to user 4711"):
        open_own_file(tmp_path / "log", os.O_WRONLY)
    with pytest.raises(OSError, match="File name too long"):
        read_bytes(tmp_path / ("x" * 300))
    assert describe_removed(tmp_path, tmp_path.stat()) == ""
    assert "was removed while the job ran" in describe_removed(tmp_path / "gone", tmp_path.stat())


def test_whole_file_is_moved_into_place_over_a_link_and_leaves_no_temporary_one(tmp_path):
    (tmp_path / "target").write_text("kept")
    (tmp_path / "plan.json").symlink_to(tmp_path / "target")
    write_private(tmp_path / "plan.json", "new \udcff")
    assert (tmp_path / "plan.json").read_bytes() == b"new \xff"
    assert (tmp_path / "target").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["plan.json", "target"]


def test_file_that_cannot_be_moved_into_place_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_private(tmp_path / "plan.json", "{}")
    assert os.listdir(tmp_path) == ["plan.json"]


def test_events_on_a_full_disk_are_no_error(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), log._file.fileno())
    log.note("over", {"reason": "r"})
    log.close()


def test_fault_is_added_to_the_record_of_the_job(tmp_path):
    (tmp_path / "scheduler.log").write_text("job J\n")
    record_fault(tmp_path, "h1: msrun itself failed: KeyError", "Traceback:\n  \x1b[2Jhere\n\n")
    text = (tmp_path / "scheduler.log").read_text()
    assert re.fullmatch(
        r"job J\n\d{4}-\d\d-\d\d \d\d:\d\d:\d\d h1: msrun itself failed: KeyError\nTraceback:\n  here\n", text
    )


def test_fault_is_said_where_there_is_no_record(tmp_path, capsys):
    record_fault(tmp_path / "gone", "msrun itself failed: KeyError", "Traceback:\n")
    assert capsys.readouterr().err.endswith("msrun itself failed: KeyError\nTraceback:\n")


PLAN = {
    "job_id": "a",
    "run_dir": "/r",
    "grace_s": 2.5,
    "hosts": [
        {"name": "h0", "workers": [{"global_rank": rank, "log": f"/logs/worker_{rank}.log"} for rank in (1, 0)]},
        {"name": "h1", "workers": [{"global_rank": 2, "log": "/logs/worker_2.log"}]},
    ],
}


def lines(*events):
    """Return events as the job writes them, a second apart."""
    return b"".join(
        json.dumps({"time": 100.0 + index, "job_s": float(index), **event}).encode() + b"\n"
        for index, event in enumerate(events)
    )


def started(rank, pid):
    return {"event": "started", "global_rank": rank, "pid": pid}


def exited(rank, state, how):
    return {"event": "exited", "global_rank": rank, "state": state, "how": how, "status": 0}


BEGIN = [{"event": "preparing", "preload": []}, {"event": "ready"}, {"event": "scheduler", "pid": 9}]
FIRST = [*BEGIN, started(0, 10), started(1, 11), {"event": "running", "world_size": 2}]
FAILED = [
    *FIRST,
    exited(1, "failed", "exit code 4"),
    {"event": "stopping", "reason": "rank 1 ended with exit code 4"},
    exited(0, "stopped by msrun", "signal SIGTERM"),
]
AGAIN = [*FAILED, {"event": "restarting", "attempt": 0, "delay_s": 1.0, "reason": "r"}, started(0, 20)]


def test_events_tell_of_the_newest_start():
    failed = parse_events(lines(*FAILED))
    assert failed.workers == {
        0: WorkerRecord(10, "stopped by msrun", "signal SIGTERM"),
        1: WorkerRecord(11, "failed", "exit code 4"),
    }
    assert (failed.begin, failed.newest, failed.is_running) == (100.0, 108.0, True)
    assert (failed.stopping, failed.over) == ("rank 1 ended with exit code 4", None)
    again = parse_events(lines(*AGAIN))
    assert again.workers == {0: WorkerRecord(20, "running")}
    assert (again.restarts, again.is_running, again.stopping) == (1, False, None)
    over = parse_events(lines(*AGAIN, {"event": "over", "reason": "well"}))
    assert over.over == "well"


@given(st.data())
def test_a_cut_off_file_tells_what_its_whole_lines_tell(data):
    whole = lines(*AGAIN, {"event": "over", "reason": "r"})
    cut = data.draw(st.integers(0, len(whole)))
    full_lines = whole[: whole.rfind(b"\n", 0, cut) + 1]
    if whole[cut : cut + 1] != b"\n":  # then even the last line is whole
        assert parse_events(whole[:cut]) == parse_events(full_lines)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "workers", "log"]), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["time", "global_rank", "pid", "state", "how", "reason"]), VALUES),
    st.sampled_from(["preparing", "started", "running", "exited", "stopping", "restarting", "over", "new"]) | VALUES,
)
def test_no_value_of_an_event_is_an_error(fields, kind):
    record = parse_events(json.dumps({**fields, "event": kind}).encode())
    assert all(isinstance(rank, int) and isinstance(worker.pid, int) for rank, worker in record.workers.items())


@given(st.dictionaries(st.sampled_from(["job_id", "run_dir", "grace_s", "hosts"]), VALUES))
def test_no_value_of_a_plan_is_an_error(fields):
    plan = parse_plan(json.dumps({**PLAN, **fields}).encode())
    assert plan is None or all("/" not in worker.log_name for worker in plan.workers)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_what_is_no_plain_file_is_not_read(tmp_path, kind):
    path = tmp_path / "plan.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    assert read_bytes(path) is None
