"""What a job shows: one live line on a terminal, bars in place, and nothing that an absent reader could hold up."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from contextlib import closing
from dataclasses import dataclass

import pytest
from asked_cases import one_fast
from job_runner import MARK, WORKERS, wait_until
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


@pytest.fixture
def terminal(msrun, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    shown = Terminal(msrun, tmp_path, "--worker_num=2", "train.py")
    yield shown
    shown.close()


def test_progress_line_tells_step_share_speed_and_loss_also_of_a_quiet_msrun(msrun, tmp_path):
    (tmp_path / "train.py").write_text(REPORTING)
    with closing(Terminal(msrun, tmp_path, "--worker_num=2", "--progress", "--quiet", "train.py")) as terminal:
        terminal.read_until(b"msrun: step 30/40 [###############-----] 75 %, ")
        terminal.read_until(b" steps/s, loss 0.25, ")
        terminal.read_until(b" left")
        (tmp_path / "go").touch()
        assert terminal.finish() == 0
        assert terminal.text.endswith(b"\r\x1b[K")  # it was taken away


@pytest.mark.slow
def test_control_c_stops_the_job(terminal):
    terminal.read_until(b"2 of 2 up")
    terminal.type(b"\x03")
    assert terminal.finish() == 128 + signal.SIGINT
    assert b"msrun: error: stopped by SIGINT" in terminal.text


@pytest.mark.slow
def test_closing_the_terminal_ends_the_job(terminal, msrun):
    terminal.read_until(b"2 of 2 up")
    terminal.hang_up()
    assert terminal.process.wait(DEADLINE_S) == 128 + signal.SIGHUP
    msrun.prove_nothing_left(deadline_s=0)


BAR = """
import os, sys, time
sys.stderr.write("epoch 1\\n\\r 10%|#  |")
sys.stderr.flush()
while not os.path.exists("go"):
    time.sleep(0.01)
sys.stderr.write("\\r 20%|## |\\r100%|###|\\n")
"""
BYTES = b"epoch 1\n\r 10%|#  |\r 20%|## |\r100%|###|\n"


@pytest.mark.slow
@pytest.mark.parametrize("where", one_fast("--worker_num=1", "--rehearse=2x1"))
def test_raw_bytes_come_unchanged_and_at_once(msrun, tmp_path, where):
    (tmp_path / "bar.py").write_text(BAR)
    reader, writer = os.pipe()
    words = [sys.executable, "-m", "msrun", where, f"--forward_env={MARK}", "--raw", "--quiet", "bar.py"]
    job = subprocess.Popen(words, cwd=tmp_path, env=msrun.environ(), stdout=writer, stderr=writer)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as stream:
        begin = BYTES[: BYTES.index(b"\r 20%")]
        text = b""
        while len(text) < len(begin):
            data = stream.read(len(begin) - len(text))
            assert data, text
            text += data
        assert text == begin, "while the worker waits"
        (tmp_path / "go").touch()
        assert text + stream.readall() == BYTES
    assert job.wait(DEADLINE_S) == 0


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
OTHER = {"stdout": "stderr", "stderr": "stdout"}


@dataclass
class Unread:
    """A job one of whose streams leads to a pipe or a terminal that takes nothing more."""

    process: subprocess.Popen[bytes]
    reader: int


@pytest.fixture
def start(msrun, tmp_path):
    """Starts a job that ends with a status when `go` is there; its workers have written when this returns."""
    started = []

    def begin(where, code):
        if where == "terminal":
            reader, writer = pty.openpty()
            termios.tcflow(writer, termios.TCOOFF)  # what Ctrl-S does
        else:
            reader, writer = os.pipe()
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            os.write(writer, b"x" * PIPE_BYTES * (where == "stderr"))
        streams = {name: subprocess.DEVNULL if where == other else writer for name, other in OTHER.items()}
        (tmp_path / "flood.py").write_text(FLOOD)
        words = [sys.executable, "-m", "msrun", "--worker_num=2", "--grace=1", "flood.py", str(code)]
        settings = {"cwd": tmp_path, "env": msrun.environ(), "stdin": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(words, **settings, **streams)
        os.close(writer)
        started.append(Unread(process, reader))
        wait_until(lambda: all((tmp_path / f"written_{rank}").exists() for rank in range(2)), "workers have written")
        return started[-1]

    yield begin
    for job in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
        if job.reader >= 0:
            os.close(job.reader)


@pytest.mark.parametrize("where", one_fast("stdout", "stderr", "terminal"))
def test_the_job_ends_by_itself_with_its_own_status(start, where, tmp_path):
    job = start(where, 7)
    (tmp_path / "go").touch()
    assert job.process.wait(DEADLINE_S) == 7


@pytest.mark.slow
@pytest.mark.parametrize("where", ["stdout", "terminal"])
def test_stop_ends_the_job(start, msrun, tmp_path, where):
    job = start(where, 0)
    stopped = msrun.start("--stop=log_output", cwd=tmp_path).finish()
    assert stopped.code == 0, stopped.stderr
    assert job.process.wait(DEADLINE_S) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_pause_loses_nothing(start, tmp_path):
    """While nobody reads, lines wait in the log; a reader that comes back gets them all."""
    job = start("stdout", 0)
    (tmp_path / "go").touch()
    text = b""
    while data := os.read(job.reader, 1 << 16):
        text += data
    assert job.process.wait(DEADLINE_S) == 0
    assert [int(line.split()[0]) for line in text.splitlines()] == list(range(4000))


CLOSINGS = ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- 2>&-", "<&- >&- 2>&-"]


@pytest.mark.slow
@pytest.mark.parametrize("streams", one_fast(*reversed(CLOSINGS)))
def test_job_whose_streams_are_closed_ends_with_its_own_status_also_in_the_background(msrun, tmp_path, streams):
    """As with /dev/null in their place."""
    closed = ("sh", "-c", f'exec "$0" -m msrun "$@" {streams}', sys.executable)
    for options, status in ((), 9), (("--join=False",), 0):
        words = ("--worker_num=2", *options, WORKERS / "end.py", "all", str(status))
        finished = msrun.start(*words, cwd=tmp_path, command=closed).finish()
        assert finished.code == status, finished.stderr
        wait_until(lambda job=finished: job.events and job.events[-1]["event"] == "over", "the job is over")
        msrun.prove_nothing_left()
        assert [event["event"] for event in finished.events].count("exited") == 2
        assert (finished.log_dir / "failure.json").exists() is bool(status)
