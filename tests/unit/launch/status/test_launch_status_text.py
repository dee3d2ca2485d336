"""The status as text, as a live table and as JSON: columns, groups for big jobs, nothing that a terminal would obey."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from msrun import contract
from msrun.agent.processes.process_control import Usage
from msrun.agent.processes.progress_board import Progress
from msrun.launch.output import describe_span
from msrun.launch.status import (
    MAX_RANKS,
    JobState,
    JobStatus,
    LiveTable,
    PlainRows,
    WorkerRow,
    draw,
    head_lines,
    render_json,
    render_status,
)

RUNNING = JobStatus(
    "f00d", JobState.RUNNING, "", None, ("a", "b"), launcher_host="a", launcher_pid=7, run_time_s=75.0, restarts=0,
    log_dir=Path("/logs"), grace_s=10.0, rows=(), notes=(), now=1000.0,
)  # fmt: skip
ROWS = (WorkerRow(0, "a", 10, "running", 995.0, 41, 0.25), WorkerRow(1, "b", 0, "planned", None, None, None))
STATUS = replace(RUNNING, rows=ROWS)


def test_running_job_in_plain_columns():
    assert render_status(STATUS).splitlines() == [
        "job f00d: running",
        "launcher pid 7 on a, hosts a, b, up 1 min 15 s",
        "logs in /logs",
        "rank  host  pid  state    last log   step  loss",
        "0     a     10   running  5.0 s ago  41    0.25",
        "1     b     -    planned  -          -     -",
    ]


def test_ended_job_tells_reason_exit_status_restarts_and_damage():
    ended = replace(
        STATUS, state=JobState.FAILED, reason="r", exit_code=4, restarts=2, rows=(), notes=("plan.json is damaged",)
    )
    assert render_status(ended).splitlines() == [
        "job f00d: failed: r",
        "launcher pid 7 on a, hosts a, b, ran for 1 min 15 s, started again 2 times, exit status 4",
        "logs in /logs",
        "note: plan.json is damaged",
    ]


def test_thousands_of_workers_are_groups_of_equal_ones():
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


def test_more_hosts_than_rows_are_told_by_the_state_of_their_workers_alone():
    rows = [WorkerRow(rank, f"h{rank}", rank, "running", None, None, None) for rank in range(70)]
    assert render_status(replace(STATUS, rows=tuple(rows))).splitlines()[4].split()[:3] == ["0-69", "70", "hosts"]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (("a", "b", "a"), "launcher pid 7 on a, hosts a, b, up"),
        (("b",), "launcher pid 7 on a, host b, up"),
        (("a", "a"), "launcher pid 7 on a, up"),
        ((), "launcher pid 7 on a, up"),
    ],
)
def test_hosts_are_named_once_unless_it_is_the_launcher_s_alone(hosts, words):
    assert render_status(replace(STATUS, hosts=hosts)).splitlines()[1].startswith(words)


@pytest.mark.parametrize(("runs", "words"), [(6, "0, 2, 4, 6, 8, 10"), (7, "0, 2, 4, 6, 8, ..., 12")])
def test_runs_of_ranks_are_all_named_up_to_a_limit(runs, words):
    rows = tuple(
        WorkerRow(rank, "h", 1, "a" if rank % 2 == 0 and rank < 2 * runs else "b", None, None, None)
        for rank in range(100)
    )
    assert render_status(replace(STATUS, rows=rows)).splitlines()[4].split("  ")[0] == words


def test_terminal_gets_the_same_lines_in_colour():
    lost = replace(STATUS, rows=(ROWS[0], replace(ROWS[1], state="lost")))
    lines = render_status(lost, has_colours=True).split("\n")
    assert [line[:5] for line in lines if line.endswith("\x1b[m")] == ["\x1b[32m", "\x1b[31m"]
    assert re.sub(r"\x1b\[[0-9]*m", "", "\n".join(lines)) == render_status(lost)


@given(st.text(max_size=20), st.text(max_size=20), st.booleans())
def test_no_text_of_a_job_moves_the_cursor_or_breaks_a_line(reason, host, is_terminal):
    status = replace(STATUS, reason=reason, launcher_host=host, rows=(replace(ROWS[0], host=host, state=reason),))
    text = re.sub(r"\x1b\[[0-9]*m", "", render_status(status, has_colours=is_terminal))
    assert len(text.split("\n")) == 5
    assert all(line.isprintable() for line in text.split("\n"))
    for char in ("\r", "\x07", "\x9b", "\x1b]", "\u202e"):
        assert char not in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (9.94, "9.9 s"),
        (9.95, "10 s"),
        (60.0, "1 min 0 s"),
        (3599.0, "59 min 59 s"),
        (7260.0, "2 h 1 min"),
        (90000.0, "1 d 1 h"),
    ],
)
def test_spans_are_in_the_units_people_use(seconds, words):
    assert describe_span(seconds) == words


LIVE = replace(RUNNING, clock=50.0)
IN_STEP_41 = Progress(contract.PHASE_JOINED, 41, 49.0, 0.25, total=100)
WAITING = replace(IN_STEP_41, is_waiting=True, waiting_since=38.0, name="all_reduce of 8 ranks")


def row(global_rank, host="a", state="running", progress=IN_STEP_41):
    usage = Usage(10.0 + global_rank, (global_rank + 1) << 20) if state == "running" else None
    last_line = f"line of {global_rank}"
    return WorkerRow(
        global_rank, host, 100 + global_rank, state, 990.0, 41, 0.25, "x.log", last_line, progress, 2.5, usage
    )


def cells(table, status):
    return [tuple(row.values()) for row in table.read(status)]


def test_rank_has_a_row_with_the_share_of_a_core_since_the_look_before():
    table = LiveTable()
    first = replace(LIVE, rows=(row(0),))
    assert cells(table, first) == [("0", "a", "running", "41/100", "2.5", "0.25", "-", "1 MiB", "line of 0")]
    later = replace(row(0), usage=Usage(13.0, 3 << 30))
    assert cells(table, replace(first, clock=52.0, rows=(later,)))[0][6:8] == ("150%", "3.0 GiB")


def test_more_ranks_than_a_screen_holds_are_one_row_for_each_host():
    half = MAX_RANKS // 2
    rows = [row(rank, "ab"[rank > half]) for rank in range(MAX_RANKS + 1)]
    rows[3] = replace(rows[3], state="failed: exit code 1", step=40, usage=None)
    rows[5] = replace(rows[5], progress=WAITING)
    rows[6] = replace(rows[6], log_at=999.0)
    first, second = LiveTable().read(replace(LIVE, rows=tuple(rows)))
    assert len(LiveTable().read(replace(LIVE, rows=tuple(rows[:MAX_RANKS])))) == MAX_RANKS
    assert (first["ranks"], first["host"], second["ranks"], second["host"]) == ("0-16", "a", "17-32", "b")
    assert tuple(first.values())[2:6] == ("15 running, 1 failed, 1 waiting", "40 to 41", "2.5", "0.25")
    assert tuple(first.values())[7:] == (f"{sum(range(1, 18)) - 4} MiB", "[6] line of 6")


def test_what_a_worker_writes_cannot_move_the_cursor():
    [hostile] = LiveTable().read(replace(LIVE, rows=(replace(row(0), last_line="a\x1b[2Jb\rc"),)))
    assert hostile["last line"] == "ab\\rc"


def drawn(status, width):
    """Return the lines of the table on a terminal of so many columns."""
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(status, LiveTable().read(status)))
    text = console.file.getvalue()
    return [line.rstrip() for line in text.splitlines()]


def test_terminal_has_the_lines_about_the_job_above_the_table():
    assert drawn(replace(LIVE, rows=(row(0), row(10, "b", "planned"))), 100) == [
        *head_lines(LIVE),
        "rank  host  state       step  steps/s       loss    CPU    memory  last line",
        "0     a     running   41/100      2.5       0.25      -     1 MiB  line of 0",
        "10    b     planned   41/100      2.5       0.25      -         -  line of 10",
    ]


def test_narrow_terminal_shortens_the_last_lines_of_logs_first():
    long = replace(row(0, progress=WAITING), last_line="xx " * 20)
    lines = drawn(replace(LIVE, rows=(long,)), 80)
    assert len(lines) == 5
    assert lines[4].startswith("0     a     waits 12 s  41/100      2.5       0.25      -     1 MiB  xx xx")
    assert lines[4].endswith("…")


@pytest.mark.parametrize(
    ("state", "progress", "colour"),
    [
        ("failed: exit code 1", IN_STEP_41, 31),
        ("running", WAITING, 33),
        ("running", IN_STEP_41, 32),
        ("planned", IN_STEP_41, None),
    ],
)
def test_state_of_a_worker_has_a_colour(state, progress, colour):
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    status = replace(LIVE, rows=(row(0, state=state, progress=progress),))
    console.print(draw(status, LiveTable().read(status)))
    last = console.file.getvalue().splitlines()[-1]
    word = "waits" if progress is WAITING else state.partition(":")[0]
    assert re.findall(r"\x1b\[(\d+)m([a-z]+)", last) == ([(str(colour), word)] if colour else [])


def test_rows_are_added_when_something_else_than_their_load_has_changed(capsys):
    view = PlainRows()
    first = replace(LIVE, rows=(row(0), row(1)))
    view.show(first)
    begins = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert begins == ["job", "launcher", "logs", "time", *[ANY] * 2]
    view.show(replace(first, clock=52.0, rows=(replace(row(0), usage=Usage(13.0, 3 << 30)), row(1))))
    assert capsys.readouterr().out == ""
    view.show(replace(first, rows=(row(0), replace(row(1), last_line="another line"))))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[1] == "1" and line.endswith("another line")
    view.show(replace(first, state=JobState.ENDED, rows=(row(0), replace(row(1), last_line="another line"))))
    assert capsys.readouterr().out.splitlines() == [head_lines(replace(first, state=JobState.ENDED))[0]]


def test_json_holds_numbers_or_null_and_the_same_keys_for_every_worker():
    planned = WorkerRow(1, "b", 0, "planned", None, None, float("nan"))
    told = json.loads(render_json(replace(LIVE, rows=(row(0, progress=WAITING), planned))))
    first, second = told.pop("workers")
    nothing = {"job_id": "f00d", "reason": "", "exit_code": None, "restarts": 0, "notes": []}
    times = {"time": 1000.0, "run_time_s": 75.0}
    place = {"log_dir": "/logs", "hosts": ["a", "b"], "launcher": {"host": "a", "pid": 7}}
    assert told == {"state": "running", **nothing, **times, **place}
    assert first == {
        "global_rank": 0,
        "host": "a",
        "pid": 100,
        "state": "running",
        "how": "",
        "log": "/logs/x.log",
        "step": 41,
        "total_steps": 100,
        "steps_per_s": 2.5,
        "loss": 0.25,
        "log_time": 990.0,
        "waits_s": 12.0,
        "doing": "step 41, waits in all_reduce of 8 ranks for 12.0 s",
        "last_line": "line of 0",
        "cpu_s": 10.0,
        "memory_bytes": 1 << 20,
    }
    texts = {"global_rank": 1, "host": "b", "state": "planned", "how": "", "doing": "", "last_line": ""}
    assert second == {**dict.fromkeys(first), **texts}
    failed = replace(row(0), state="failed: exit code 5")
    told = json.loads(render_json(replace(LIVE, state=JobState.FAILED, exit_code=5, rows=(failed,))))
    assert (told["state"], told["exit_code"]) == ("failed", 5)
    assert (told["workers"][0]["state"], told["workers"][0]["how"]) == ("failed", "exit code 5")
