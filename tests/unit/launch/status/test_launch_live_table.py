"""The live table: one row for each rank, one for each host of a big job, and steps that nobody waits for in vain."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from dataclasses import replace
from unittest.mock import ANY

import pytest
from rich.console import Console
from running_status import RUNNING

from msrun import contract
from msrun.agent.processes.process_control import Usage
from msrun.agent.watch.progress_board import Progress
from msrun.launch.status.job_status import JobState, JobStatus, WorkerRow
from msrun.launch.status.status_text import head_lines, render_json
from msrun.launch.status.watch import HOST_HEADINGS, MAX_RANKS, LiveTable, PlainRows, RichTable

STATUS = replace(RUNNING, clock=50.0)
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


def drawn(status: JobStatus, width: int) -> list[str]:
    """Return the lines of the table on a terminal of so many columns."""
    console = Console(file=io.StringIO(), width=width)
    console.print(RichTable(1.0)._draw(status))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_terminal_has_the_lines_about_the_job_above_the_table() -> None:
    assert drawn(replace(STATUS, rows=(row(0), row(10, "b", "planned"))), 100) == [
        *head_lines(STATUS),
        "rank  host  state       step  steps/s       loss    CPU    memory  last line",
        "0     a     running   41/100      2.5       0.25      -     1 MiB  line of 0",
        "10    b     planned   41/100      2.5       0.25      -         -  line of 10",
    ]


def test_table_without_a_row_is_left_out() -> None:
    assert drawn(STATUS, 100) == head_lines(STATUS)


def test_lines_that_are_too_long_for_the_terminal_are_cut() -> None:
    long = replace(row(0), last_line="x" * 200)
    lines = drawn(replace(STATUS, rows=(long,), notes=("n" * 200,)), 100)
    assert len(lines) == 6
    assert [len(line) for line in (lines[3], lines[5])] == [100, 100]
    assert lines[3].endswith("n…") and lines[5].endswith("x…")


def test_narrow_terminal_shortens_the_last_lines_of_logs_first() -> None:
    long = replace(row(0, progress=WAITING), last_line="xx " * 20)
    lines = drawn(replace(STATUS, rows=(long,)), 80)
    assert len(lines) == 5
    assert lines[4].startswith("0     a     waits 12 s  41/100      2.5       0.25      -     1 MiB  xx xx")
    assert lines[4].endswith("…")


@pytest.mark.parametrize(
    ("state", "progress", "colour"),
    [
        ("failed: exit code 1", IN_STEP_41, 31),
        ("lost", IN_STEP_41, 31),
        ("running", WAITING, 33),
        ("stopped", IN_STEP_41, 33),
        ("running", IN_STEP_41, 32),
        ("done", IN_STEP_41, 32),
        ("planned", IN_STEP_41, None),
    ],
)
def test_state_of_a_worker_has_a_colour(state: str, progress: Progress, colour: int | None) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    console.print(RichTable(1.0)._draw(replace(STATUS, rows=(row(0, state=state, progress=progress),))))
    last = console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined]
    word = "waits" if progress is WAITING else state.partition(":")[0]
    assert re.findall(r"\x1b\[(\d+)m([a-z]+)", last) == ([(str(colour), word)] if colour else [])


def test_table_on_a_terminal_is_drawn_at_once_with_the_cursor_in_sight_and_without_a_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    threads = threading.active_count()
    table = RichTable(1.0)
    with table as view:
        assert view is table
        begin = capsys.readouterr().out
        assert begin.rindex("\x1b[?25h") > begin.rindex("\x1b[?25l")
        view.show(replace(STATUS, rows=(row(0),)))
        assert "line of 0" in capsys.readouterr().out
        assert threading.active_count() == threads
        print("said by others")
        print("and their errors", file=sys.stderr)
        said = capsys.readouterr()
        assert (said.out, said.err) == ("said by others\n", "and their errors\n")
    assert "line of 0" in capsys.readouterr().out, "the last one stays"
    assert not table._live.is_started


def test_rows_are_added_when_something_else_than_their_load_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainRows(10.0)
    first = replace(STATUS, rows=(row(0), row(1)))
    view.show(first)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "job",
        "launcher",
        "logs",
        "time",
        *[ANY] * 2,
    ]
    view.show(replace(first, clock=52.0, rows=(replace(row(0), usage=Usage(13.0, 3 << 30)), row(1))))
    assert capsys.readouterr().out == ""
    view.show(replace(first, rows=(row(0), replace(row(1), last_line="another line"))))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[1] == "1" and line.endswith("another line")
    view.show(replace(first, state=JobState.ENDED, rows=(row(0), replace(row(1), last_line="another line"))))
    assert capsys.readouterr().out.splitlines() == [head_lines(replace(first, state=JobState.ENDED))[0]]


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
