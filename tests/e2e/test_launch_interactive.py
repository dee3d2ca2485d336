"""--interactive: the terminal and the standard input of msrun belong to one rank."""

import hashlib
import os
import signal
import subprocess
import sys
import time

import pytest
from asked_cases import one_fast
from job_runner import wait_until
from terminal import Terminal

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


@pytest.fixture
def on_terminal(msrun, tmp_path):
    started = []

    def start(text, *words):
        (tmp_path / "train.py").write_text(text)
        started.append(Terminal(msrun, tmp_path, *words, "train.py"))
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()


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
