"""On a terminal one live line shows where the job is; it gives way to the workers' lines and is gone at the end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runner import JobRunner, wait_until
from terminal import DEADLINE_S, Terminal

SCRIPT = """
import os, time
rank = os.environ["RANK"]
print("loss: 0.5", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print("rank", rank, "ends")
"""
REPORTING = """
import os, time
from msrun.runtime import report_progress
for step in range(1, 31):
    report_progress(step, 0.25, total=40)
    time.sleep(0.01)
while not os.path.exists("go"):
    time.sleep(0.01)
"""


def state_of(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def terminal(msrun: JobRunner, tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "train.py").write_text(SCRIPT)
    shown = Terminal(msrun, tmp_path, "--worker_num=2", "train.py")
    yield shown
    shown.close()


@pytest.mark.slow
def test_live_line_shows_ranks_and_loss_and_leaves_at_the_end(terminal: Terminal, tmp_path: Path) -> None:
    terminal.read_until(b"2 of 2 up, 2 running, 0 done")
    terminal.read_until(b"loss 0.5")
    (tmp_path / "go").touch()
    terminal.read_until(None)
    assert terminal.process.wait(DEADLINE_S) == 0
    assert b"rank 0 ends\r\n" in terminal.text
    assert b"all 2 workers finished successfully" in terminal.text
    after_live = terminal.text.rpartition(b" running, ")[2]
    assert b"\r\x1b[Kmsrun: all 2" in after_live or b"\r\x1b[Krank 0" in after_live  # it was taken away


def test_progress_line_tells_step_share_speed_and_loss_also_of_a_quiet_msrun(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REPORTING)
    terminal = Terminal(msrun, tmp_path, "--worker_num=2", "--progress", "--quiet", "train.py")
    try:
        terminal.read_until(b"msrun: step 30/40 [###############-----] 75 %, ")
        terminal.read_until(b" steps/s, loss 0.25, ")
        terminal.read_until(b" left")
        (tmp_path / "go").touch()
        terminal.read_until(None)
        assert terminal.process.wait(DEADLINE_S) == 0
        assert terminal.text.endswith(b"\r\x1b[K")  # it was taken away
    finally:
        terminal.close()


@pytest.mark.slow
def test_without_a_terminal_there_is_no_progress_line(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REPORTING)
    (tmp_path / "go").touch()
    finished = msrun.run("--worker_num=2", "--progress", "train.py", cwd=tmp_path)
    assert finished.code == 0
    assert b"step" not in finished.stdout and "step" not in finished.stderr


@pytest.mark.slow
def test_paused_and_continued_the_launcher_goes_on(terminal: Terminal, tmp_path: Path) -> None:
    """As with Ctrl-Z and fg: the workers have gone on meanwhile."""
    terminal.read_until(b"2 of 2 up")
    terminal.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(terminal.process.pid) == "T", "the launcher is stopped")
    (tmp_path / "go").touch()
    wait_until(lambda: b"ends" in (tmp_path / "log_output" / "worker_1.log").read_bytes(), "workers go on")
    terminal.process.send_signal(signal.SIGCONT)
    terminal.read_until(None)
    assert terminal.process.wait(DEADLINE_S) == 0


@pytest.mark.slow
def test_a_paused_launcher_is_stopped_by_its_directory(terminal: Terminal, msrun: JobRunner, tmp_path: Path) -> None:
    terminal.read_until(b"2 of 2 up")
    terminal.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(terminal.process.pid) == "T", "the launcher is stopped")
    stopped = msrun.start("--stop=log_output", cwd=tmp_path).finish()
    assert stopped.code == 0, stopped.stderr
    terminal.read_until(None)
    assert terminal.process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_control_c_stops_the_job(terminal: Terminal) -> None:
    terminal.read_until(b"2 of 2 up")
    terminal.type(b"\x03")
    terminal.read_until(None)
    assert terminal.process.wait(DEADLINE_S) == 128 + signal.SIGINT
    assert b"msrun: error: stopped by SIGINT" in terminal.text


@pytest.mark.slow
def test_closing_the_terminal_ends_the_job(terminal: Terminal, msrun: JobRunner) -> None:
    terminal.read_until(b"2 of 2 up")
    terminal.hang_up()
    assert terminal.process.wait(DEADLINE_S) == 128 + signal.SIGHUP
    msrun.prove_nothing_left(deadline_s=0)
