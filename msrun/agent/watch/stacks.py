"""Where every worker stands: the stacks of its threads, written by itself, or what the kernel knows of it.

Python's faulthandler writes stacks from within a signal handler, without the interpreter's help, so it works in a
worker that is deep in a collective. A process that does not catch the signal would die of it and is not sent it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from msrun.agent.logs.own_file import open_own_file
from msrun.agent.processes.process_control import signal_processes
from msrun.agent.processes.process_stat import read_stat
from msrun.planning.environment import STACK_SIGNAL

STACK_WAIT_S = 1.0
"""What workers get to write their stacks."""

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended, not collected",
}


def catches(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal. Source: proc(5), SigCgt of /proc/PID/status."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc", str(pid), "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def kernel_state(pid: int) -> str:
    """Return what the kernel says of a process, e.g. "stopped by a signal" or "sleeping in futex_wait_queue"."""
    stat = read_stat(pid)
    if stat is None:
        return "gone"
    letter = stat.state
    text = _STATES.get(letter, f"in state {letter}")
    with contextlib.suppress(OSError):
        where = Path("/proc", str(pid), "wchan").read_text()
        if letter in "SD" and where not in ("", "0"):
            text += f" in {where}"
    return text


def request_stacks(logs: Mapping[int, str], headline: str) -> None:
    """Have every worker write its stacks into its log; for one that cannot, the kernel's view of it is written there.

    Args:
        logs: process id -> path of its log.
        headline: line that comes first.
    """
    for pid, log_path in logs.items():
        if catches(pid, STACK_SIGNAL):
            _append(log_path, f"\nmsrun: {headline}\n")
            signal_processes([pid], STACK_SIGNAL)
            signal_processes([pid], signal.SIGCONT)  # a stopped process handles no signal
        else:
            view = f"this process cannot write its stacks; the kernel's view: {kernel_state(pid)}"
            _append(log_path, f"\nmsrun: {headline}; {view}\n")


def _append(path: str, text: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = open_own_file(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, text.encode("utf-8", "backslashreplace"))
        finally:
            os.close(descriptor)
