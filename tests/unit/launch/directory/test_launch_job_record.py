"""Plan and events as others read them: all that is whole is understood, and no damage is an error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.launch.directory.job_record import EventsRecord, WorkerRecord, parse_events, parse_plan, read_bytes

PLAN = {
    "job_id": "a",
    "run_dir": "/r",
    "grace_s": 2.5,
    "hosts": [
        {"name": "h0", "workers": [{"global_rank": rank, "log": f"/logs/worker_{rank}.log"} for rank in (1, 0)]},
        {"name": "h1", "workers": [{"global_rank": 2, "log": "/logs/worker_2.log"}]},
    ],
}


def lines(*events: dict[str, Any]) -> bytes:
    """Return events as the job writes them, a second apart."""
    return b"".join(
        json.dumps({"time": 100.0 + index, "job_s": float(index), **event}).encode() + b"\n"
        for index, event in enumerate(events)
    )


def started(rank: int, pid: int) -> dict[str, Any]:
    return {"event": "started", "global_rank": rank, "pid": pid}


def exited(rank: int, state: str, how: str) -> dict[str, Any]:
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


def test_plan_is_read_in_rank_order() -> None:
    plan = parse_plan(json.dumps(PLAN).encode())
    assert plan is not None
    assert (plan.job_id, plan.run_dir, plan.grace_s, plan.hosts) == ("a", "/r", 2.5, ("h0", "h1"))
    assert [(worker.global_rank, worker.host, worker.log_name) for worker in plan.workers] == [
        (0, "h0", "worker_0.log"),
        (1, "h0", "worker_1.log"),
        (2, "h1", "worker_2.log"),
    ]


def test_events_tell_of_the_newest_start() -> None:
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


def test_unknown_events_and_fields_change_nothing_but_the_time() -> None:
    known = parse_events(lines(*FIRST))
    more = parse_events(lines(*FIRST, {"event": "hang", "lagging": [1]}, {"event": "signal", "name": "SIGUSR1"}))
    assert more.newest == 107.0
    more.newest = known.newest
    assert more == known


@given(st.data())
def test_a_cut_off_file_tells_what_its_whole_lines_tell(data: st.DataObject) -> None:
    whole = lines(*AGAIN, {"event": "over", "reason": "r"})
    cut = data.draw(st.integers(0, len(whole)))
    full_lines = whole[: whole.rfind(b"\n", 0, cut) + 1]
    if whole[cut : cut + 1] != b"\n":  # then even the last line is whole
        assert parse_events(whole[:cut]) == parse_events(full_lines)


@given(st.data())
def test_no_damage_is_an_error(data: st.DataObject) -> None:
    for whole in (lines(*AGAIN), json.dumps(PLAN).encode()):
        begin = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(begin, len(whole)))
        damaged = whole[:begin] + data.draw(st.binary(max_size=20)) + whole[end:]
        assert isinstance(parse_events(damaged), EventsRecord)
        parse_plan(damaged)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "workers", "log"]), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["time", "global_rank", "pid", "state", "how", "reason"]), VALUES),
    st.sampled_from(["preparing", "started", "running", "exited", "stopping", "restarting", "over", "new"]) | VALUES,
)
def test_no_value_of_an_event_is_an_error(fields: dict[str, Any], kind: Any) -> None:
    record = parse_events(json.dumps({**fields, "event": kind}).encode())
    assert all(isinstance(rank, int) and isinstance(worker.pid, int) for rank, worker in record.workers.items())


@given(st.dictionaries(st.sampled_from(["job_id", "run_dir", "grace_s", "hosts"]), VALUES))
def test_no_value_of_a_plan_is_an_error(fields: dict[str, Any]) -> None:
    plan = parse_plan(json.dumps({**PLAN, **fields}).encode())
    assert plan is None or all("/" not in worker.log_name for worker in plan.workers)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_what_is_no_plain_file_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "plan.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    assert read_bytes(path) is None
