"""What the kernel says of processes, read of some that are made for it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from job_runner import wait_until

from msrun.agent.processes.process_control import read_all_stats, read_stat


def test_process_is_told_with_parent_session_and_environment() -> None:
    own = read_stat("self")
    assert own is not None
    assert (own.pid, own.parent, own.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert own.state == "R" and own.cpu_ticks > 0 and own.resident_pages > 0
    begin, end = own.environment
    assert ctypes.string_at(begin, end - begin) == Path("/proc/self/environ").read_bytes()
    assert own.pid in {stat.pid for stat in read_all_stats()}


def test_name_with_blanks_and_brackets_moves_no_field() -> None:
    code = "from setproctitle import setthreadtitle as t; t(') R 1 2 (('); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: (found := read_stat(child.pid)) is not None and found.state == "T", "stopped")
        stat = read_stat(child.pid)
        assert stat is not None and (stat.parent, stat.session) == (os.getpid(), os.getsid(0))
        child.kill()


def test_process_that_is_not_there_is_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert read_stat(child.pid) is None
