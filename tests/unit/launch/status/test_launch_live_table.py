"""The live table: one row for each rank, one for each host of a big job, and steps that nobody waits for in vain."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from msrun import contract
from msrun.agent.watch.progress_board import Progress
from msrun.agent.watch.usage import Usage
from msrun.launch.status.job_status import JobState, JobStatus, WorkerRow
from msrun.launch.status.live_table import HOST_HEADINGS, MAX_RANKS, LiveTable
from msrun.launch.status.status_json import render_json

STATUS = JobStatus(
    job_id="f00d",
    state=JobState.RUNNING,
    reason="",
    exit_code=None,
    hosts=("a", "b"),
    launcher_host="a",
    launcher_pid=7,
    run_time_s=75.0,
    restarts=0,
    log_dir=Path("/logs"),
    grace_s=10.0,
    rows=(),
    notes=(),
    now=1000.0,
    clock=50.0,
)
IN_STEP_41 = Progress(contract.PHASE_JOINED, 41, 49.0, 0.25, total=100)
WAITING = replace(IN_STEP_41, is_waiting=True, waiting_since=38.0, name="all_reduce of 8 ranks")


def row(global_rank: int, host: str = "a", state: str = "running", progress: Progress = IN_STEP_41) -> WorkerRow:
    usage = Usage(10.0 + global_rank, (global_rank + 1) << 20) if state == "running" else None
    last_line = f"line of {global_rank}"
    return WorkerRow(
        global_rank, host, 100 + global_rank, state, 990.0, 41, 0.25, "x.log", last_line, progress, 2.5, usage
    )


def test_rank_has_a_row_with_the_share_of_a_core_since_the_look_before() -> None:
    table = LiveTable()
    first = replace(STATUS, rows=(row(0),))
    assert table.read(first)[1] == [("0", "a", "running", "41/100", "2.5", "0.25", "-", "1 MiB", "line of 0")]
    later = replace(row(0), usage=Usage(13.0, 3 << 30))
    assert table.read(replace(first, clock=52.0, rows=(later,)))[1][0][6:8] == ("150%", "3.0 GiB")


def test_worker_that_waits_for_others_says_for_how_long() -> None:
    [cells] = LiveTable().read(replace(STATUS, rows=(row(0, progress=WAITING),)))[1]
    assert cells[2] == "waits 12 s"
    [cells] = LiveTable().read(replace(STATUS, clock=40.0, rows=(row(0, progress=WAITING),)))[1]
    assert cells[2] == "running"


def test_more_ranks_than_a_screen_holds_are_one_row_for_each_host() -> None:
    half = MAX_RANKS // 2
    rows = [row(rank, "ab"[rank > half]) for rank in range(MAX_RANKS + 1)]
    rows[3] = replace(rows[3], state="failed: exit code 1", step=40, usage=None)
    rows[5] = replace(rows[5], progress=WAITING)
    rows[6] = replace(rows[6], log_at=999.0)
    headings, cells = LiveTable().read(replace(STATUS, rows=tuple(rows)))
    assert headings == HOST_HEADINGS
    assert [line[:2] for line in cells] == [("0-16", "a"), ("17-32", "b")]
    assert cells[0][2:6] == ("15 running, 1 failed, 1 waiting", "40 to 41", "2.5", "0.25")
    assert cells[0][7:] == (f"{sum(range(1, 18)) - 4} MiB", "[6] line of 6")


def test_what_a_worker_writes_cannot_move_the_cursor() -> None:
    [cells] = LiveTable().read(replace(STATUS, rows=(replace(row(0), last_line="a\x1b[2Jb\rc"),)))[1]
    assert cells[-1] == "ab\\rc"


def test_json_holds_numbers_or_null_and_the_same_keys_for_every_worker() -> None:
    planned = WorkerRow(1, "b", 0, "planned", None, None, float("nan"))
    told = json.loads(render_json(replace(STATUS, rows=(row(0, progress=WAITING), planned))))
    assert (told["state"], told["exit_code"], told["launcher"]) == ("running", None, {"host": "a", "pid": 7})
    first, second = told["workers"]
    assert first.keys() == second.keys()
    assert (first["waits_s"], first["cpu_s"], first["memory_bytes"], first["total_steps"]) == (12.0, 10.0, 1 << 20, 100)
    assert (second["pid"], second["loss"], second["steps_per_s"], second["log"]) == (None, None, None, None)
    failed = replace(row(0), state="failed: exit code 5")
    told = json.loads(render_json(replace(STATUS, state=JobState.FAILED, exit_code=5, rows=(failed,))))
    assert (told["state"], told["exit_code"]) == ("failed", 5)
    assert (told["workers"][0]["state"], told["workers"][0]["how"]) == ("failed", "exit code 5")
