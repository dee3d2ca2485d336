"""The status as text: aligned columns, groups for big jobs, nothing that a terminal would obey."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.launch.status.job_status import JobState, JobStatus, WorkerRow
from msrun.launch.status.status_text import MAX_ROWS, describe_span, render_status

ROWS = (
    WorkerRow(0, "a", 10, "running", 995.0, 41, 0.25),
    WorkerRow(1, "b", 0, "planned", None, None, None),
)
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
    rows=ROWS,
    notes=(),
    now=1000.0,
)


def test_running_job_in_plain_columns() -> None:
    assert render_status(STATUS).splitlines() == [
        "job f00d: running",
        "launcher pid 7 on a, hosts a, b, up 1 min 15 s",
        "logs in /logs",
        "rank  host  pid  state    last log   step  loss",
        "0     a     10   running  5.0 s ago  41    0.25",
        "1     b     -    planned  -          -     -",
    ]


def test_ended_job_tells_reason_exit_status_restarts_and_damage() -> None:
    ended = replace(
        STATUS, state=JobState.FAILED, reason="r", exit_code=4, restarts=2, rows=(), notes=("plan.json is damaged",)
    )
    assert render_status(ended).splitlines() == [
        "job f00d: failed: r",
        "launcher pid 7 on a, hosts a, b, ran for 1 min 15 s, started again 2 times, exit status 4",
        "logs in /logs",
        "note: plan.json is damaged",
    ]


def test_thousands_of_workers_are_groups_of_equal_ones() -> None:
    rows = [WorkerRow(rank, f"h{rank // 1000}", rank, "running", 990.0 + rank % 5, rank, 0.5) for rank in range(3000)]
    rows[1500] = replace(rows[1500], state="failed: exit code 4", log_at=None, step=None, loss=None)
    text = render_status(replace(STATUS, rows=tuple(rows)))
    assert text.splitlines()[3:] == [
        "ranks                 host  workers  state                last log           step          loss",
        "0-999                 h0    1000     running              6.0 s to 10 s ago  0 to 999      0.5",
        "1000-1499, 1501-1999  h1    999      running              6.0 s to 10 s ago  1000 to 1999  0.5",
        "1500                  h1    1        failed: exit code 4  -                  -             -",
        "2000-2999             h2    1000     running              6.0 s to 10 s ago  2000 to 2999  0.5",
    ]


def test_many_hosts_are_groups_of_equal_state() -> None:
    rows = [
        WorkerRow(rank, f"h{rank // 8}", rank, "running" if rank else "done", 990.0, 7, 0.5) for rank in range(4096)
    ]
    text = render_status(replace(STATUS, rows=tuple(rows)))
    assert text.splitlines()[3:] == [
        "ranks   host       workers  state    last log  step  loss",
        "0       h0         1        done     10 s ago  7     0.5",
        "1-4095  512 hosts  4095     running  10 s ago  7     0.5",
    ]


def test_ranks_of_a_scattered_group_are_cut_short() -> None:
    rows = tuple(WorkerRow(rank, "h", 1, "ab"[rank % 2], None, None, None) for rank in range(1000))
    cells = render_status(replace(STATUS, rows=rows)).splitlines()[4:]
    assert [line.split("  ")[0] for line in cells] == ["0, 2, 4, 6, 8, ..., 998", "1, 3, 5, 7, 9, ..., 999"]


@pytest.mark.parametrize("count", [1, MAX_ROWS, MAX_ROWS + 1])
def test_number_of_lines_is_that_of_workers_up_to_a_limit(count: int) -> None:
    rows = tuple(replace(ROWS[0], global_rank=rank) for rank in range(count))
    assert len(render_status(replace(STATUS, rows=rows)).splitlines()) == 4 + (count if count <= MAX_ROWS else 1)


def test_terminal_gets_the_same_words_in_colour() -> None:
    text = render_status(STATUS, 120)
    assert "\x1b[" in text
    for word in ("job f00d: running", "last log", "5.0 s ago", "0.25", "planned"):
        assert word in text


@given(st.text(max_size=20), st.text(max_size=20), st.booleans())
def test_no_text_of_a_job_moves_the_cursor_or_breaks_a_line(reason: str, host: str, is_terminal: bool) -> None:
    status = replace(STATUS, reason=reason, launcher_host=host, rows=(replace(ROWS[0], host=host, state=reason),))
    text = render_status(status, 200 if is_terminal else None)
    if not is_terminal:
        assert len(text.split("\n")) == 5
        assert all(line.isprintable() for line in text.split("\n"))
    for char in ("\r", "\x07", "\x9b", "\x1b]", "\u202e"):
        assert char not in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0.0 s"),
        (9.96, "10 s"),
        (59.9, "59 s"),
        (60.0, "1 min 0 s"),
        (3599.0, "59 min 59 s"),
        (7260.0, "2 h 1 min"),
        (90000.0, "1 d 1 h"),
    ],
)
def test_spans_are_in_the_units_people_use(seconds: float, words: str) -> None:
    assert describe_span(seconds) == words
