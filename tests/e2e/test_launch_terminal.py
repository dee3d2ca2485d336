"""What a job shows: one live line on a terminal, bars in place, and nothing that an absent reader could hold up."""

import contextlib
import fcntl
import hashlib
import os
import pty
import signal
import subprocess
import sys
import termios
import time
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
def on_terminal(msrun, tmp_path):
    """Starts msrun with a script on a terminal of its own."""
    started = []

    def start(text, *words):
        (tmp_path / "train.py").write_text(text)
        started.append(Terminal(msrun, tmp_path, *words, "train.py"))
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()


@pytest.fixture
def terminal(on_terminal):
    return on_terminal(SCRIPT, "--worker_num=2")


def test_progress_line_tells_step_share_speed_and_loss_also_of_a_quiet_msrun(on_terminal, tmp_path):
    terminal = on_terminal(REPORTING, "--worker_num=2", "--progress", "--quiet")
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


# -- --interactive: the terminal and the standard input of msrun belong to one rank -----------------------------------

DEBUGGED = """
import os
x = 1
if os.environ["RANK"] == "0":
    breakpoint()
print("rank", os.environ["RANK"], "ends")
"""
ASKING = """
import os, sys, time
if os.environ["RANK"] == "0":
    try:
        print("ready", flush=True)
        print("got", input("? "))
    except KeyboardInterrupt:
        print("interrupted")
"""
INTERRUPTED = """
import time
try:
    print("? ", end="", flush=True)
    for _ in range(6000):
        time.sleep(0.01)
except KeyboardInterrupt:
    print("interrupted")
"""
"""Not by input(): CPython loses a signal that comes between its prompt and its read."""
READING = """
import hashlib, os, sys
data = sys.stdin.buffer.read()
print(os.environ["RANK"], len(data), hashlib.sha256(data).hexdigest())
"""
NOTICE = "msrun: standard input is not read: --interactive gives it to rank 0"


def run_with(msrun, folder, stdin, *words, **settings):
    """Run msrun with this standard input; returns exit status, stdout and stderr."""
    words = (sys.executable, "-m", "msrun", *words)
    settings = {"cwd": folder, "env": msrun.environ({}), "capture_output": True, "timeout": 60, **settings}
    done = subprocess.run(words, **({"stdin": stdin} if stdin is not None else {}), check=False, **settings)
    return done.returncode, done.stdout, done.stderr.decode()


def resize(terminal):
    """Have the debugged rank see another size of the terminal."""
    terminal.resize(30, 100)
    terminal.type(b"import os, time\nwhile os.get_terminal_size() != (100, 30): time.sleep(0.01)\n\np 'resized'*2\n")
    terminal.read_until(b"resizedresized")


def test_breakpoint_prompts_and_obeys(on_terminal, tmp_path):
    terminal = on_terminal(DEBUGGED, "--worker_num=2", "--interactive")
    terminal.read_until(b"(Pdb) ")
    assert terminal.is_raw
    terminal.type(b"p x+41\n")
    terminal.read_until(b"\r\n42\r\n")
    resize(terminal)
    terminal.type(b"c\n")
    assert terminal.finish() == 0
    assert b"rank 0 ends" in terminal.text
    assert b"running" not in terminal.text, "no live line"
    assert b"(Pdb) p x+41\n42\n" in (tmp_path / "log_output" / "worker_0.log").read_bytes()
    assert not terminal.is_raw


@pytest.mark.slow
def test_control_c_is_the_ranks(on_terminal):
    terminal = on_terminal(INTERRUPTED, "--worker_num=1", "--interactive")
    terminal.read_until(b"? ")
    terminal.type(b"\x03")
    assert terminal.finish() == 0
    assert b"interrupted" in terminal.text


@pytest.mark.slow
@pytest.mark.parametrize("way", ["keys", "SIGTERM"])
def test_the_terminal_comes_back_when_the_job_is_ended(on_terminal, way):
    terminal = on_terminal(ASKING, "--worker_num=2", "--interactive", "--grace=0")
    terminal.read_until(b"? ")
    assert terminal.is_raw
    if way == "keys":
        terminal.type(b"\x1d\x1d\x1d")
    else:
        terminal.process.send_signal(signal.SIGTERM)
    assert terminal.finish() == (130 if way == "keys" else 143)
    assert not terminal.is_raw
    assert b"\nmsrun: error: stopped by SIG" in terminal.text


@pytest.mark.slow
def test_the_terminal_comes_back_while_the_job_is_paused(on_terminal):
    terminal = on_terminal(ASKING, "--worker_num=2", "--interactive")
    terminal.read_until(b"? ")
    terminal.process.send_signal(signal.SIGTSTP)
    wait_until(lambda: not terminal.is_raw, "the shell has its terminal")
    terminal.process.send_signal(signal.SIGCONT)
    wait_until(lambda: terminal.is_raw, "the rank has it again")
    terminal.type(b"words\n")
    assert terminal.finish() == 0
    assert b"got words" in terminal.text


@pytest.mark.slow
def test_nobody_is_impatient_with_a_user(on_terminal):
    terminal = on_terminal(ASKING, "--worker_num=1", "--interactive", "--hang_time_out=0.5")
    terminal.read_until(b"? ")
    asked_at = time.monotonic()
    wait_until(lambda: time.monotonic() - asked_at > 2.0, "longer than the limit")
    terminal.type(b"late\n")
    assert terminal.finish() == 0
    assert b"got late" in terminal.text


@pytest.mark.parametrize("kind", one_fast("pipe", "file"))
def test_standard_input_reaches_the_rank(msrun, tmp_path, kind):
    (tmp_path / "train.py").write_text(READING)
    data = os.urandom(1 << 20)
    (tmp_path / "data").write_bytes(data)
    with (tmp_path / "data").open("rb") as file:
        given = {"stdin": file} if kind == "file" else {"stdin": None, "input": data}
        words = ("--worker_num=2", "--interactive=1", "train.py")
        code, stdout, stderr = run_with(msrun, tmp_path, given.pop("stdin"), *words, **given)
    assert code == 0, stderr
    assert stdout.split()[-3:] == [b"1", b"%d" % len(data), hashlib.sha256(data).hexdigest().encode()]
    assert (tmp_path / "log_output" / "worker_0.log").read_text().startswith("0 0 ")


@pytest.mark.slow
def test_standard_input_that_nobody_reads_is_said(msrun, tmp_path):
    (tmp_path / "data").write_text("words\n")
    with (tmp_path / "data").open() as file:
        assert NOTICE in run_with(msrun, tmp_path, file, "--worker_num=1", "true")[2]
    assert NOTICE not in run_with(msrun, tmp_path, subprocess.DEVNULL, "--worker_num=1", "true")[2]
