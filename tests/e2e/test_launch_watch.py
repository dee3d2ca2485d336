"""`msrun --status LOG_DIR --watch` follows a job to its end: on a terminal, through a pipe, as JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import DEADLINE_S, JobRunner, Running

SCRIPT = """
import os, sys, time
from msrun.runtime import report_progress
rank = int(os.environ["RANK"])
step = 0
while not os.path.exists("go"):
    step += 1
    report_progress(step, 0.5, total=100000)
    print("training, step", step, flush=True)
    open(f"ready_{rank}", "w").close()
    time.sleep(0.02)
if rank == 1 and os.path.exists("fail"):
    sys.exit("no more data")
"""


@pytest.fixture
def job(msrun: JobRunner, tmp_path: Path) -> Running:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = msrun.start("--worker_num=2", "train.py", cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    return job


def read_until(descriptor: int, has_come: Callable[[bytes], bool]) -> bytes:
    """Read a terminal until this holds of what has come, or until nobody writes to it any more."""
    text, end = b"", time.monotonic() + DEADLINE_S
    while not has_come(text):
        assert time.monotonic() < end, text
        if select.select([descriptor], [], [], 0.2)[0]:
            try:
                text += os.read(descriptor, 65536)
            except OSError:  # the other end is closed
                return text
    return text


def watch_on_terminal(msrun: JobRunner, cwd: Path, terminal: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "msrun", "--status", "log_output", "--watch=0.2"],
        cwd=cwd,
        env=msrun.environ({"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"}),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )


@pytest.mark.slow
def test_terminal_shows_one_table_until_the_job_fails_and_keeps_the_last_one(
    msrun: JobRunner, job: Running, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    process = watch_on_terminal(msrun, tmp_path, theirs)
    os.close(theirs)
    text = read_until(ours, lambda text: text.count(b"steps/s") > 2 and b" MiB" in text)
    (tmp_path / "fail").touch()
    (tmp_path / "go").touch()
    text += read_until(ours, lambda _: False)
    os.close(ours)
    assert process.wait(DEADLINE_S) == 1
    assert job.finish().code == 1
    plain = re.sub(rb"\x1b\[[\d;?]*[A-Za-z]", b"", text).decode()
    assert re.search(r"\n0 +\S+ +running +\d+/100000 +[\d.]+ +0\.5 +\d+% +\d+ MiB +training, step \d+", plain), plain
    last = plain[plain.rindex("\r\nlogs in") :]
    assert re.search(r"\n1 +\S+ +failed: exit code 1 .*no more data", last), last
    assert text.count(b"\x1b[1A") > 10  # drawn in place


@pytest.mark.slow
def test_ctrl_c_leaves_with_130_and_the_terminal_as_it_was(msrun: JobRunner, job: Running, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = watch_on_terminal(msrun, tmp_path, theirs)
    text = read_until(ours, lambda text: text.count(b"steps/s") > 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    assert termios.tcgetattr(theirs) == before
    os.close(theirs)
    text += read_until(ours, lambda _: False)
    os.close(ours)
    assert text.rindex(b"\x1b[?25h") > text.rindex(b"\x1b[?25l")  # the cursor is there
    assert b"Traceback" not in text
    (tmp_path / "go").touch()
    assert job.finish().code == 0


def test_pipe_gets_the_headings_once_and_rows_that_have_changed(msrun: JobRunner, job: Running, tmp_path: Path) -> None:
    watching = msrun.start("--status", "log_output", "--watch=0.2", cwd=tmp_path)
    stdout = msrun.temporary / "run-2" / "stdout"
    read_growing(stdout, lambda text: text.count(" running ") >= 6)
    (tmp_path / "go").touch()
    assert job.finish().code == 0
    finished = watching.finish()
    assert (finished.code, finished.stderr) == (0, "")
    lines = finished.stdout.decode().splitlines()
    assert "\x1b" not in finished.stdout.decode()
    assert sum(line.startswith("time ") for line in lines) == 1
    rows = [re.split(r"  +", line) for line in lines if re.match(r"\d\d:\d\d:\d\d ", line)]
    steps = [int(row[4].partition("/")[0]) for row in rows if row[1] == "0"]
    assert steps == sorted(steps)
    assert {row[3] for row in rows[-2:]} == {"done"}
    assert lines[-3].startswith("job ") and "finished successfully" in lines[-3]


def read_growing(path: Path, has_come: Callable[[str], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not has_come(path.read_text()):
        assert time.monotonic() < end, path.read_text()
        time.sleep(0.02)


@pytest.mark.slow
def test_json_is_one_object_a_line_and_the_last_one_tells_the_end(
    msrun: JobRunner, job: Running, tmp_path: Path
) -> None:
    watching = msrun.start("--status", "log_output", "--watch=0.2", "--json", cwd=tmp_path)
    stdout = msrun.temporary / "run-2" / "stdout"
    read_growing(stdout, lambda text: text.count("\n") >= 3)
    (tmp_path / "go").touch()
    assert job.finish().code == 0
    finished = watching.finish()
    assert finished.code == 0
    told = [json.loads(line) for line in finished.stdout.splitlines()]
    first, last = told[0], told[-1]
    assert (first["state"], last["state"], last["exit_code"]) == ("running", "succeeded", 0)
    worker = first["workers"][1]
    assert (worker["pid"], worker["total_steps"], worker["loss"]) == (job.pid_of("1"), 100000, 0.5)
    assert worker["steps_per_s"] > 0 and worker["memory_bytes"] > 1 << 20 and worker["cpu_s"] >= 0
    assert worker["last_line"].startswith("training, step ")
    assert [worker["state"] for worker in last["workers"]] == ["done", "done"]


@pytest.mark.slow
def test_reader_that_has_enough_is_no_error(msrun: JobRunner, job: Running, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "msrun", "--status", "log_output", "--watch=0.1", "--json"],
        cwd=tmp_path,
        env=msrun.environ(),
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    os.read(reader, 100)
    os.close(reader)
    assert (process.communicate(timeout=DEADLINE_S)[1], process.returncode) == (b"", 0)
    (tmp_path / "go").touch()
    assert job.finish().code == 0


@pytest.mark.parametrize(
    ("words", "pattern"),
    one_fast(
        (["--watch"], "--watch: shows a job that was started before; give its --status LOG_DIR, too"),
        (["--json", "train.py"], "--json: shows a job that was started before; give its --status LOG_DIR, too"),
        (["--status", "--json"], "--status --json: give the --log_dir of a job after --status"),
        (["--status", ".", "--watch=never"], "--watch: 'never': give a number of seconds, 0.1 to 86400"),
        (["--status", ".", "--watch=0"], "--watch: '0': give a number of seconds, 0.1 to 86400"),
        (["--status", "nowhere", "--watch"], r"--status \S*/nowhere: no such directory; give the --log_dir of a job"),
    ),
)
def test_wrong_words_are_an_error_in_one_line(msrun: JobRunner, tmp_path: Path, words: list[str], pattern: str) -> None:
    finished = msrun.run(*words, cwd=tmp_path)
    assert finished.code == 2
    assert re.fullmatch(f"msrun: error: {pattern}\n", finished.stderr)
