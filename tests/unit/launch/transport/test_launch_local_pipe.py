"""A child process as an agent on this host."""

from __future__ import annotations

import os
import selectors
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job_runner import wait_until
from pipe_ends import read

from msrun.agent.processes.process_control import is_stopped
from msrun.errors import ClusterError
from msrun.launch.rehearsal import HostShare
from msrun.launch.transport import pipe as module
from msrun.launch.transport.pipe import LocalPipe

ECHO = "import sys; data = sys.stdin.buffer.readline(); sys.stdout.buffer.write(data.upper()); sys.stdout.flush(); "
WAIT = "sys.stdin.read()"


@pytest.fixture
def start() -> Iterator[Callable[[str], LocalPipe]]:
    pipes: list[LocalPipe] = []

    def make(code: str) -> LocalPipe:
        pipes.append(LocalPipe([sys.executable, "-c", code], "10.0.0.1"))
        return pipes[-1]

    yield make
    for pipe in pipes:
        pipe.process.kill()
        pipe.close()
        pipe._socket.close()  # open until nobody has the pipe any more: its last bytes may still be read
        pipe._stderr.close()


def test_bytes_go_to_the_agent_and_come_back(start: Callable[[str], LocalPipe]) -> None:
    pipe = start(ECHO + WAIT)
    assert pipe.address == "10.0.0.1"
    pipe.write(b"hello\n")
    assert read(pipe) == b"HELLO\n"
    pipe.close()
    assert read(pipe) == b""
    assert pipe.exit_status == 0, "it has ended with its stdin"


@pytest.mark.parametrize(
    ("code", "status"),
    [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 15)", 128 + signal.SIGTERM)],
)
def test_status_is_that_of_the_agent(start: Callable[[str], LocalPipe], code: str, status: int) -> None:
    pipe = start(code)
    assert read(pipe) == b""
    assert pipe.exit_status == status


def test_nothing_is_waited_for(start: Callable[[str], LocalPipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 0.05)
    pipe = start("import time; time.sleep(600)")
    assert pipe.read() is None, "it has said nothing"
    data = bytes(1 << 16)
    while pipe.write(data) == len(data):
        pass
    while pipe.write(data):
        pass
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ | selectors.EVENT_WRITE)
        assert not selector.select(0), "there is no room, and nothing to read"
        pipe.close()
        assert selector.select(30)
    assert read(pipe) == b""
    with pytest.raises(BrokenPipeError):
        pipe.write(b"hello\n")


def test_agent_that_runs_has_no_status(start: Callable[[str], LocalPipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 0.05)
    pipe = start(ECHO + WAIT)
    assert pipe.exit_status is None


def test_end_of_what_it_said_on_stderr_is_kept(
    start: Callable[[str], LocalPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STDERR_BYTES", 5)
    pipe = start("import sys; sys.stderr.write('x' * 100 + 'last\\n')")
    assert read(pipe) == b"" and pipe.exit_status == 0
    assert pipe.stderr_text() == "last\n"


def test_write_to_a_closed_pipe_is_an_error(start: Callable[[str], LocalPipe]) -> None:
    pipe = start("pass")
    pipe.close()
    with pytest.raises(BrokenPipeError):
        pipe.write(b"x")


def test_agent_that_is_stopped_is_killed_and_one_that_is_slow_is_not(
    start: Callable[[str], LocalPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_S", 0.05)
    slow = start("import time; print(1, flush=True); time.sleep(600)")
    stopped = start("import time; print(1, flush=True); time.sleep(600)")
    for pipe in (slow, stopped):
        assert read(pipe) == b"1\n"
    os.kill(stopped.process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(stopped.process.pid), "it is stopped")
    for pipe in (slow, stopped):
        pipe.close()
    assert stopped.process.wait(30) == -signal.SIGKILL
    assert slow.process.poll() is None


def test_stopped_agent_of_a_rehearsal_lives_on_without_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 0.05)
    pipe = LocalPipe([sys.executable, "-c", "import time; time.sleep(600)"], "", HostShare({"A": "1"}))
    environ = Path(f"/proc/{pipe.process.pid}/environ")
    assert wait_until(environ.read_bytes, "it has begun") == b"A=1\0"
    os.kill(pipe.process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pipe.process.pid), "it is stopped")
    pipe.close()
    assert (read(pipe), pipe.process.poll()) == (b"", None)
    pipe.process.kill()
    assert pipe.process.wait(30) == -signal.SIGKILL


def test_interpreter_that_is_not_there_is_named() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        ClusterError, match=r"this host: cannot start /no/python \(No such file or directory\); see --py"
    ) as caught:
        LocalPipe(["/no/python"], "")
    assert caught.value.__traceback__, "holds the pipe, so nothing is closed by the collector"
    assert len(os.listdir("/proc/self/fd")) == before
