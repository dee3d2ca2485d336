"""The status as text: aligned columns, groups for big jobs, nothing that a terminal would obey."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running_status import RUNNING

from msrun.launch.status.job_status import JobState, WorkerRow
from msrun.launch.status.status_text import MAX_ROWS, describe_span, render_status

ROWS = (
    WorkerRow(0, "a", 10, "running", 995.0, 41, 0.25),
    WorkerRow(1, "b", 0, "planned", None, None, None),
)
STATUS = replace(RUNNING, rows=ROWS)


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


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (("a", "b", "a"), "launcher pid 7 on a, hosts a, b, up"),
        (("b",), "launcher pid 7 on a, host b, up"),
        (("a", "a"), "launcher pid 7 on a, up"),
        ((), "launcher pid 7 on a, up"),
    ],
)
def test_hosts_are_named_once_unless_it_is_the_launcher_s_alone(hosts: tuple[str, ...], words: str) -> None:
    assert render_status(replace(STATUS, hosts=hosts)).splitlines()[1].startswith(words)


@pytest.mark.parametrize(("hosts", "groups"), [(MAX_ROWS, MAX_ROWS), (MAX_ROWS + 1, 1)])
def test_as_many_hosts_as_rows_fit_are_shown_one_by_one(hosts: int, groups: int) -> None:
    rows = tuple(WorkerRow(rank, f"h{rank // 2}", rank, "running", None, None, None) for rank in range(2 * hosts))
    assert len(render_status(replace(STATUS, rows=rows)).splitlines()) == 4 + groups


def test_group_that_has_just_logged_is_no_older_than_that() -> None:
    rows = tuple(WorkerRow(rank, "h", rank, "running", STATUS.now - rank % 2 / 2, 1, 0.5) for rank in range(100))
    assert "0.0 s to 0.5 s ago" in render_status(replace(STATUS, rows=rows))


@pytest.mark.parametrize(("runs", "words"), [(6, "0, 2, 4, 6, 8, 10"), (7, "0, 2, 4, 6, 8, ..., 12")])
def test_runs_of_ranks_are_all_named_up_to_a_limit(runs: int, words: str) -> None:
    rows = tuple(
        WorkerRow(rank, "h", 1, "a" if rank % 2 == 0 and rank < 2 * runs else "b", None, None, None)
        for rank in range(100)
    )
    assert render_status(replace(STATUS, rows=rows)).splitlines()[4].split("  ")[0] == words


def test_ranks_of_a_scattered_group_are_cut_short() -> None:
    rows = tuple(WorkerRow(rank, "h", 1, "ab"[rank % 2], None, None, None) for rank in range(1000))
    cells = render_status(replace(STATUS, rows=rows)).splitlines()[4:]
    assert [line.split("  ")[0] for line in cells] == ["0, 2, 4, 6, 8, ..., 998", "1, 3, 5, 7, 9, ..., 999"]


@pytest.mark.parametrize("count", [1, MAX_ROWS, MAX_ROWS + 1])
def test_number_of_lines_is_that_of_workers_up_to_a_limit(count: int) -> None:
    rows = tuple(replace(ROWS[0], global_rank=rank) for rank in range(count))
    assert len(render_status(replace(STATUS, rows=rows)).splitlines()) == 4 + (count if count <= MAX_ROWS else 1)


def _without_colours(text: str) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).split("\n")]


def test_terminal_gets_the_same_lines_in_colour_once_the_columns_fit() -> None:
    lines = render_status(replace(STATUS, notes=("plan.json is damaged",))).split("\n")
    text = render_status(replace(STATUS, notes=("plan.json is damaged",)), max(map(len, lines[4:])))
    assert "\x1b[" in text
    assert _without_colours(text) == lines


def test_narrow_terminal_gets_each_line_about_the_job_whole() -> None:
    long = replace(STATUS, rows=(), reason="a reason of many words", notes=("a note that is wide",))
    assert _without_colours(render_status(long, 12)) == render_status(long).split("\n")


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
        (9.94, "9.9 s"),
        (9.95, "10 s"),
        (59.9, "59 s"),
        (60.0, "1 min 0 s"),
        (3599.0, "59 min 59 s"),
        (3600.0, "1 h 0 min"),
        (7260.0, "2 h 1 min"),
        (86400.0, "1 d 0 h"),
        (90000.0, "1 d 1 h"),
    ],
)
def test_spans_are_in_the_units_people_use(seconds: float, words: str) -> None:
    assert describe_span(seconds) == words
