"""The trace of a job, event by event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plans import small_plan

from msrun.errors import UsageError
from msrun.launch.trace import build_trace, write_trace

EVENTS = [
    {"time": 100.0, "event": "preparing"},
    {"time": 100.5, "event": "started", "global_rank": 0, "pid": 7},
    {"time": 100.5, "event": "started", "global_rank": 1, "pid": 8},
    {"time": 101.0, "event": "exited", "global_rank": 1, "state": "failed", "how": "exit code 4"},
    {"time": 101.5, "event": "restarting", "job_s": 1.5, "reason": "rank 1 failed"},
    {"time": 102.0, "event": "started", "global_rank": 1, "pid": 9},
    {"time": 102.5, "event": "memory", "global_rank": 1},
]
WORKER = [
    {"global_rank": 0, "host": "b", "pid": 7, "attempt": 0, "time": 100.5, "clock": 50.0},
    ["step", "1", 50.5, 51.0],
    ["wait", "all_reduce", 50.75, 50.875],
    ["wait", "late", 51.0, 50.0],
]


def lines(values: list[Any]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def names(process: int, name: str, *rows: str) -> list[dict[str, Any]]:
    return [
        {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}},
        *(
            {"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": text}}
            for row, text in enumerate(rows)
        ),
    ]


def span(rank: int, row: int, name: str, begin_ms: int, length_ms: int, args: dict[str, Any]) -> dict[str, Any]:
    kind = ("process", "steps", "waits in collectives")[row]
    place = {"pid": rank + 1, "tid": row, "ts": 1000 * begin_ms, "dur": 1000 * length_ms}
    return {"name": name, "cat": kind, "ph": "X", **place, "args": args}


def test_processes_moments_steps_and_waits_are_on_one_clock() -> None:
    trace = build_trace("J", {1: "a"}, [lines(EVENTS)], [lines(WORKER)])
    moment = {"cat": "job", "ph": "i", "s": "g", "pid": 0, "tid": 0}
    rows = ("process", "steps", "waits in collectives")
    assert trace.events == [
        *names(0, "msrun, job J", "events"),
        {"name": "preparing", "ts": 0, **moment, "args": {}},
        span(1, 0, "failed: exit code 4", 500, 500, {"attempt": 0, "pid": 8}),
        {"name": "restarting", "ts": 1_500_000, **moment, "args": {"reason": "rank 1 failed"}},
        span(0, 0, "running", 500, 2000, {"attempt": 1, "pid": 7}),
        span(1, 0, "running", 2000, 500, {"attempt": 1, "pid": 9}),
        span(0, 1, "step 1", 1000, 500, {"attempt": 0}),
        span(0, 2, "all_reduce", 1250, 125, {"attempt": 0}),
        span(0, 2, "late", 1500, 0, {"attempt": 0}),
        *names(1, "rank 0 on b", *rows),
        *names(2, "rank 1 on a", *rows),
    ]
    assert trace.found == {"ranks": 2, "steps": 1, "waits": 2}


def test_moments_of_the_job_are_those_of_the_first_log() -> None:
    """Of a job that was started on each host, every host has written them."""
    events = [{"time": 5.0, "event": "over", "code": 0}, {"time": 4.0, "event": "started", "global_rank": 3, "pid": 1}]
    trace = build_trace("J", {}, [lines(events[:1]), lines(events)], [])
    assert [event["name"] for event in trace.events if event["ph"] == "i"] == ["over"]
    assert [event["args"]["name"] for event in trace.events if event["name"] == "process_name"] == [
        "msrun, job J",
        "rank 3",
    ]


@pytest.mark.parametrize(
    "damage",
    [
        "not json",
        ["step", "1", 50.5],
        ["step", 1, 50.5, 51.0],
        ["jump", "1", 50.5, 51.0],
        ["step", "1", 50.5, "x"],
        {"global_rank": 0, "host": "b", "clock": 1.0},
        {"global_rank": "0", "host": "b", "clock": 1.0, "time": 1.0},
    ],
)
def test_damaged_record_of_a_worker_is_left_out(damage: Any) -> None:
    text = damage.encode() + b"\n" if isinstance(damage, str) else lines([damage])
    trace = build_trace("J", {}, [], [lines(WORKER[:1]) + text + lines(WORKER[1:2])])
    assert trace.found["steps"] == (0 if isinstance(damage, dict) else 1), "without its clock nothing has a place"


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    plan = small_plan(tmp_path, 2)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    (tmp_path / "events.jsonl").write_bytes(lines(EVENTS))
    return tmp_path


def test_file_holds_the_trace_and_what_was_found_is_said(log_dir: Path) -> None:
    (log_dir / "node_1").mkdir()
    (log_dir / "node_1" / "trace_0.jsonl").write_bytes(lines(WORKER))
    said = write_trace(log_dir, None)
    assert said == (
        f"wrote {log_dir}/trace.json: 2 ranks, 1 step, 2 waits\nopen it in https://ui.perfetto.dev or chrome://tracing"
    )
    written = json.loads((log_dir / "trace.json").read_text())
    expected = build_trace("J", {0: "h", 1: "h"}, [lines(EVENTS)], [lines(WORKER)])
    assert written == {"displayTimeUnit": "ms", "traceEvents": expected.events}


def test_job_without_records_of_steps_says_which_option_was_missing(log_dir: Path) -> None:
    assert "\nthe job was started without --trace: " in write_trace(log_dir, log_dir / "t.json")
    assert (log_dir / "t.json").is_file() and not (log_dir / "trace.json").exists()


def test_folder_without_events_is_no_jobs(log_dir: Path) -> None:
    (log_dir / "events.jsonl").write_bytes(b"")
    with pytest.raises(UsageError, match="no job has used it"):
        write_trace(log_dir, None)
    with pytest.raises(UsageError, match="no such directory"):
        write_trace(log_dir / "none", None)


def test_file_that_cannot_be_written_is_an_error_of_one_line(log_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"none/t.json: cannot write \(No such file or directory\); give -o FILE"):
        write_trace(log_dir, log_dir / "none" / "t.json")
