"""--interactive over SSH: the terminal and the standard input of msrun belong to a rank on another host."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fleet import FleetRunner
from job_runner import MARK, JobRunner
from ssh_net import SshNet
from terminal import Terminal

DEBUGGED = """
import os
import signal
x = 1
if os.environ["RANK"] == "1":
    breakpoint()
print("rank", os.environ["RANK"], "ends on", os.uname().nodename)
"""
INTERRUPTED = """
import os, time
if os.environ["RANK"] == "1":
    try:
        print("? ", end="", flush=True)
        for _ in range(6000):
            time.sleep(0.01)
    except KeyboardInterrupt:
        print("interrupted on", os.uname().nodename)
"""
READING = """
import hashlib, os, sys
data = sys.stdin.buffer.read()
print(os.environ["RANK"], len(data), hashlib.sha256(data).hexdigest())
"""
OnTerminal = Callable[[str], Terminal]


@pytest.fixture(scope="module")
def net() -> Iterator[SshNet]:
    with SshNet(2) as hosts:
        yield hosts


@pytest.fixture
def fleet(msrun: JobRunner, net: SshNet, tmp_path: Path) -> FleetRunner:
    return FleetRunner(msrun, net, tmp_path)


@pytest.fixture
def on_terminal(fleet: FleetRunner) -> Iterator[OnTerminal]:
    """Starts a program on two hosts, with rank 1, on the second one, at the terminal."""
    started: list[Terminal] = []

    def start(text: str) -> Terminal:
        (fleet.cwd / "train.py").write_text(text)
        words = (f"--hosts={fleet.hosts(1, 1)}", f"--forward_env={MARK}", "--interactive=1", "train.py")
        prefix = fleet.net.prefix(fleet.net.control)
        env = {"HOME": str(fleet.net.home)}
        started.append(Terminal(fleet.runner, fleet.cwd, *words, prefix=prefix, env=env))
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()
    fleet.prove_nothing_left()


@pytest.mark.slow
def test_breakpoint_on_another_host_prompts_and_obeys(on_terminal: OnTerminal, tmp_path: Path) -> None:
    terminal = on_terminal(DEBUGGED)
    terminal.read_until(b"(Pdb) ")
    assert terminal.is_raw
    terminal.type(b"p x+41\n")
    terminal.read_until(b"\r\n42\r\n")
    terminal.resize(30, 100)
    terminal.type(b"import os, time\nwhile os.get_terminal_size() != (100, 30): time.sleep(0.01)\n\np 'resized'*2\n")
    terminal.read_until(b"resizedresized")
    terminal.type(b"c\n")
    assert terminal.finish() == 0
    assert b"rank 1 ends on host1\r\n" in terminal.text
    assert b"(Pdb) p x+41\n42\n" in (tmp_path / "log_output" / "worker_1.log").read_bytes()
    assert not terminal.is_raw


@pytest.mark.slow
def test_control_c_is_the_ranks_on_another_host(on_terminal: OnTerminal) -> None:
    terminal = on_terminal(INTERRUPTED)
    terminal.read_until(b"? ")
    terminal.type(b"\x03")
    assert terminal.finish() == 0
    assert b"interrupted on host1" in terminal.text


@pytest.mark.slow
def test_standard_input_reaches_a_rank_on_another_host_over_ssh(fleet: FleetRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(READING)
    data = os.urandom(3 << 20)
    (tmp_path / "data").write_bytes(data)
    words = (f"--hosts={fleet.hosts(1, 1)}", f"--forward_env={MARK}", "--interactive=1", "train.py")
    prefix = [*fleet.net.prefix(fleet.net.control), "sh", "-c", 'exec "$@" <data', "sh"]
    done = fleet.runner.run(*words, cwd=tmp_path, prefix=prefix, env={"HOME": str(fleet.net.home)})
    assert done.code == 0, done.stderr
    logs = [(tmp_path / "log_output" / f"worker_{rank}.log").read_text().split() for rank in range(2)]
    assert logs == [["0", "0", hashlib.sha256().hexdigest()], ["1", str(len(data)), hashlib.sha256(data).hexdigest()]]


@pytest.mark.slow
def test_what_is_typed_while_the_connection_is_made_again_is_not_lost(on_terminal: OnTerminal, net: SshNet) -> None:
    terminal = on_terminal(DEBUGGED)
    terminal.read_until(b"(Pdb) ")
    for pid in net.sessions(1):
        os.kill(pid, signal.SIGKILL)
    terminal.type(b"p x+41\n")
    terminal.read_until(b"\r\n42\r\n")
    terminal.type(b"c\n")
    assert terminal.finish() == 0
    assert terminal.text.count(b"42") == 1
    assert b"rank 1 ends on host1\r\n" in terminal.text


@pytest.mark.slow
def test_the_terminal_comes_back_when_its_host_is_lost(on_terminal: OnTerminal, fleet: FleetRunner) -> None:
    terminal = on_terminal(DEBUGGED)
    terminal.read_until(b"(Pdb) ")
    (agent,) = fleet.agents(1)
    os.kill(agent, signal.SIGKILL)
    assert terminal.finish() == 3
    assert not terminal.is_raw
    assert b"host1: the agent was ended by SIGKILL" in terminal.text


@pytest.mark.slow
def test_the_keys_that_end_the_job_end_it_on_every_host(on_terminal: OnTerminal) -> None:
    terminal = on_terminal(DEBUGGED)
    terminal.read_until(b"(Pdb) ")
    terminal.type(b"\x1d\x1d\x1d")
    assert terminal.finish() == 130
    assert not terminal.is_raw
