"""Where every worker stands: the stacks of its threads, written by itself, or what the kernel knows of it.

Python's faulthandler writes stacks from within a signal handler, without the interpreter's help, so it works in a
worker that is deep in a collective. A process that does not catch the signal would die of it and is not sent it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msrun.agent.logs.own_file import open_own_file
from msrun.agent.processes.process_control import catches, read_stat, signal_processes
from msrun.planning.environment import STACK_SIGNAL

STACK_WAIT_S = 1.0  # what workers get to write their stacks

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended, not collected",
}


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
    `logs`: process id -> path of its log. `headline`: line that comes first.
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


MAX_BYTES = 1 << 20
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*most recent call first")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')
"""As CPython's faulthandler writes them, the innermost first; the main thread comes last."""
_LIBRARY = re.compile(r"<|.*/(site-packages|dist-packages|torch|lib/python3\.\d+|msrun/(agent|runtime))/")
_WAITS = re.compile(r".*/torch/(distributed/(?!c10d_logger)|nn/parallel/distributed\.py|autograd/(graph|__init__)\.py)")
"""Where Python waits for other ranks when this is the innermost frame: DDP does so in `forward` and in `backward`."""
_WAIT_CALL = re.compile(r"([\w.]*)\.wait\(")
_STANDARD = re.compile(r"<|.*/lib/python3\.\d+/(?!site-packages|dist-packages)")
_DISPATCH = re.compile(r".*/torch/(_ops\.py|_library/|distributed/c10d_logger)")


@dataclass(frozen=True)
class Place:
    """A worker's main thread."""

    waits_in: str  # the call of torch in which it waits for other ranks; empty when it is in none
    at: str  # the innermost frame of the user's own code: `train.py:41 in step`; empty when there is none

    def describe(self) -> str:
        """Return it in words; empty when nothing is known."""
        return " ".join(filter(None, (self.waits_in and f"waits in {self.waits_in}", self.at and f"at {self.at}")))


def _source_line(path: str, number: int) -> str:
    """Return a line of a source file of this host; empty when it cannot be read."""
    try:
        with os.fdopen(open_own_file(path, os.O_RDONLY), "rb") as file:
            lines = file.read(MAX_BYTES).decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return lines[number - 1] if 0 < number <= len(lines) else ""


def _waits_itself(frames: list[tuple[str, str, str]], source_line: Callable[[str, int], str]) -> str:
    file, number, _ = frames[0]
    call = None if _STANDARD.match(file) else _WAIT_CALL.search(source_line(file, int(number)))
    return "" if call is None else f"{call[1]}.wait" if call[1] else "wait"


def read_place(log_path: str, begin: int) -> Place | None:
    """Return where a worker stands that has written its stacks into its log after byte `begin`; None when it has not.

    A log that was rotated meanwhile tells nothing.
    """
    try:
        descriptor = open_own_file(log_path, os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.pread(descriptor, MAX_BYTES, begin).decode("utf-8", "replace")
    finally:
        os.close(descriptor)
    *_, main_thread = _THREAD.split(text)
    found = [match for match in map(_FRAME.fullmatch, main_thread.split("\n")) if match]
    frames = [(match["file"], match["line"], match["function"]) for match in found]
    return find_place(frames) if frames and _THREAD.search(text) else None


def find_place(frames: list[tuple[str, str, str]], source_line: Callable[[str, int], str] = _source_line) -> Place:
    """Return what the frames of a thread tell: file, line and function of each, the innermost first.

    The wait of a `dist.Work` is native code: a line of Python that calls it is then the innermost frame. `source_line`:
    file and number -> that line of it.
    """
    waits_in, is_waiting = _waits_itself(frames, source_line), True
    for file, line, function in frames:
        if not _LIBRARY.match(file):
            return Place(waits_in, f"{os.path.basename(file)}:{line} in {function}")  # noqa: PTH119
        is_waiting = is_waiting and bool(_WAITS.match(file) or _DISPATCH.match(file))
        if is_waiting and _WAITS.match(file):
            waits_in = function
    return Place(waits_in, "")
