"""The terminal of a rank while msrun is stopped, and a job in the background that comes to nothing."""

import os
import pty
import signal
import sys
import termios
import time

import pytest

from msrun.launch import output
from msrun.launch import terminal as module
from msrun.launch.terminal import UserTerminal, detach


def test_terminal_is_the_ranks_from_its_start_to_its_end_but_while_msrun_is_stopped(monkeypatch):
    ends, seen = pty.openpty(), []
    line_ends, written = [], []
    monkeypatch.setattr(module, "STANDARD_INPUT", ends[1])
    monkeypatch.setattr(output, "set_line_end", line_ends.append)
    monkeypatch.setattr(output, "write", lambda *given: written.append(given))
    monkeypatch.setattr(os, "isatty", lambda _: True)

    def look():
        seen.append("shell" if termios.tcgetattr(ends[1])[3] & termios.ICANON else "rank")

    monkeypatch.setattr(module, "stop_this_process", look)
    said = []
    terminal = UserTerminal(1, said.append)
    steps = [terminal.stop_process, terminal.take, terminal.stop_process]
    steps += [lambda: terminal.note("exited", {"global_rank": 0}), lambda: terminal.note("exited", {"global_rank": 1})]
    steps += [terminal.stop_process, lambda: terminal.show(b"words")]
    for step in steps:
        step()
        look()
    assert seen == ["shell", "shell", "rank", "shell", "rank", "rank", *["shell"] * 4]
    assert written == [(1, b"words")]
    assert line_ends == ["\r\n", "\n"] * 2 and said[0].startswith("the terminal belongs to rank 1: Ctrl-C is its")
    for end in ends:
        os.close(end)


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        (lambda: (os.closerange(3, 256), time.sleep(0.05), os._exit(2)), 2, b""),
        (lambda: os._exit(0), 3, b""),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            137,
            b"msrun: error: the background launcher was ended by SIGKILL before its job began\n",
        ),
    ],
)
def test_command_ends_as_the_job_in_the_background_that_comes_to_nothing(end, status, said):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(writer, 2)
        sys.stderr = sys.__stderr__
        detach(quiet=False)
        end()
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        assert stream.read() == said
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
