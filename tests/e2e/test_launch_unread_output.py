"""Nobody reads what msrun prints: the job goes on, signals are heard, and the exit status is right."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, wait_until

FLOOD = """
import os, pathlib, sys, time
if os.environ["RANK"] == "0":
    for count in range(4000):
        print(count, "x" * 100, flush=True)
pathlib.Path("written_" + os.environ["RANK"]).touch()
while not os.path.exists("go"):
    time.sleep(0.01)
sys.exit(int(sys.argv[1]))
"""
PIPE_BYTES = 4096
DEADLINE_S = 20.0


class Unread:
    """A job one of whose streams leads to a pipe or a terminal that takes nothing more."""

    def __init__(self, msrun: JobRunner, cwd: Path, where: str, *words: str) -> None:
        self.cwd = cwd
        self._descriptors: list[int] = []
        streams: dict[str, int] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if where == "terminal":
            reader, writer = pty.openpty()
            termios.tcflow(writer, termios.TCOOFF)  # what Ctrl-S does
            streams = {"stdout": writer, "stderr": writer}
        else:
            reader, writer = os.pipe()
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            if where == "stderr":
                os.write(writer, b"x" * PIPE_BYTES)
            streams[where] = writer
        self.reader = reader
        self._descriptors.append(reader)
        (cwd / "flood.py").write_text(FLOOD)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "msrun", "--worker_num=2", "--grace=1", *words],
            cwd=cwd,
            env=msrun.environ(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **streams,
        )
        os.close(writer)

    def wait_for_workers(self) -> None:
        wait_until(lambda: all((self.cwd / f"written_{rank}").exists() for rank in range(2)), "workers have written")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for descriptor in self._descriptors:
            os.close(descriptor)


Start = Callable[..., Unread]


@pytest.fixture
def start(msrun: JobRunner, tmp_path: Path) -> Iterator[Start]:
    started: list[Unread] = []

    def begin(where: str, *words: str) -> Unread:
        started.append(Unread(msrun, tmp_path, where, *words))
        return started[-1]

    yield begin
    for job in started:
        job.close()


@pytest.mark.slow
@pytest.mark.parametrize("where", one_fast("stdout", "stderr", "terminal"))
def test_a_signal_ends_the_job(start: Start, where: str) -> None:
    job = start(where, "flood.py", "0")
    job.wait_for_workers()
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(DEADLINE_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize("where", one_fast("stdout", "stderr", "terminal"))
def test_the_job_ends_by_itself_with_its_own_status(start: Start, where: str, tmp_path: Path) -> None:
    job = start(where, "flood.py", "7")
    job.wait_for_workers()
    (tmp_path / "go").touch()
    assert job.process.wait(DEADLINE_S) == 7


@pytest.mark.slow
def test_stop_ends_the_job(start: Start, msrun: JobRunner, tmp_path: Path) -> None:
    job = start("stdout", "flood.py", "0")
    job.wait_for_workers()
    stopped = msrun.start("--stop=log_output", cwd=tmp_path).finish()
    assert stopped.code == 0, stopped.stderr
    assert job.process.wait(DEADLINE_S) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_pause_loses_nothing(start: Start, tmp_path: Path) -> None:
    """While nobody reads, lines wait in the log; a reader that comes back gets them all."""
    job = start("stdout", "flood.py", "0")
    job.wait_for_workers()
    (tmp_path / "go").touch()
    text = b""
    while data := os.read(job.reader, 1 << 16):
        text += data
    assert job.process.wait(DEADLINE_S) == 0
    assert [int(line.split()[0]) for line in text.splitlines()] == list(range(4000))


def test_a_flood_is_shown_whole(msrun: JobRunner, tmp_path: Path) -> None:
    """More than any queue holds, as fast as it comes."""
    (tmp_path / "flood.py").write_text(
        "import sys\nfor i in range(500):\n    sys.stdout.write(('x' * 99 + '\\n') * 1000)\n"
    )
    finished = msrun.run("--worker_num=1", "--env=PYTHONUNBUFFERED=", "flood.py", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert finished.stdout == finished.log(0)


@pytest.mark.slow
def test_a_reader_that_has_enough_does_not_end_the_job(start: Start, tmp_path: Path) -> None:
    job = start("stdout", "flood.py", "7")
    job.wait_for_workers()
    os.close(job.reader)
    job._descriptors.clear()
    (tmp_path / "go").touch()
    assert job.process.wait(DEADLINE_S) == 7
