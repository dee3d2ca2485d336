"""What is known of a worker beside its own record: where it stands, and why it has ended where its log cannot say so.

Where it stands it writes itself: Python's faulthandler writes stacks from within a signal handler, also in a worker
that is deep in a collective. A process that does not catch the signal would die of it and is not sent it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msrun.agent.host.host_facts import group_folders
from msrun.agent.own_file import append_text, read_end, read_from
from msrun.agent.processes.process_control import catches, read_stat, signal_processes
from msrun.planning.environment import STACK_SIGNAL
from msrun.planning.record import Record

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
    """Have workers write their stacks into their logs, by process id, or write the kernel's view of them there."""
    for pid, log_path in logs.items():
        if catches(pid, STACK_SIGNAL):
            append_text(log_path, f"\nmsrun: {headline}\n")
            signal_processes([pid], STACK_SIGNAL)
            signal_processes([pid], signal.SIGCONT)  # a stopped process handles no signal
        else:
            view = f"this process cannot write its stacks; the kernel's view: {kernel_state(pid)}"
            append_text(log_path, f"\nmsrun: {headline}; {view}\n")


MAX_BYTES = 1 << 20
_THREAD = r"(?:Current thread|Thread) 0x[0-9a-f]+.*most recent call first"
_FRAME = r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)'
"""As CPython's faulthandler writes them, the innermost first; the main thread comes last."""
_LIBRARY = r"<|.*/(site-packages|dist-packages|torch|lib/python3\.\d+|msrun/(agent|runtime))/"
_WAITS = r".*/torch/(distributed/(?!c10d_logger)|nn/parallel/distributed\.py|autograd/(graph|__init__)\.py)"
"""Where Python waits for other ranks when this is the innermost frame: DDP does so in `forward` and in `backward`."""
_WAIT_CALL = r"([\w.]*)\.wait\("
_STANDARD = r"<|.*/lib/python3\.\d+/(?!site-packages|dist-packages)"
_DISPATCH = r".*/torch/(_ops\.py|_library/|distributed/c10d_logger)"


class Place(Record):
    """A worker's main thread."""

    waits_in: str  # the call of torch in which it waits for other ranks; empty when it is in none
    at: str  # the innermost frame of the user's own code: `train.py:41 in step`; empty when there is none

    def describe(self) -> str:
        """Return it in words; empty when nothing is known."""
        return " ".join(filter(None, (self.waits_in and f"waits in {self.waits_in}", self.at and f"at {self.at}")))


def _source_line(path: str, number: int) -> str:
    """Return a line of a source file of this host; empty when it cannot be read."""
    lines = read_from(path, 0, MAX_BYTES).decode("utf-8", "replace").split("\n")
    return lines[number - 1] if 0 < number <= len(lines) else ""


def _waits_itself(frames: list[tuple[str, str, str]], source_line: Callable[[str, int], str]) -> str:
    file, number, _ = frames[0]
    call = None if re.match(_STANDARD, file) else re.search(_WAIT_CALL, source_line(file, int(number)))
    return "" if call is None else f"{call[1]}.wait" if call[1] else "wait"


def read_place(log_path: str, begin: int) -> Place | None:
    """Return where a worker stands that has written its stacks into its log after byte `begin`; None: it has not."""
    text = read_from(log_path, begin, MAX_BYTES).decode("utf-8", "replace")
    *_, main_thread = re.split(_THREAD, text)
    found = [match for line in main_thread.split("\n") if (match := re.fullmatch(_FRAME, line))]
    frames = [(match["file"], match["line"], match["function"]) for match in found]
    return find_place(frames) if frames and re.search(_THREAD, text) else None


def find_place(frames: list[tuple[str, str, str]], source_line: Callable[[str, int], str] = _source_line) -> Place:
    """Return what the frames of a thread tell: file, line and function of each, the innermost first. The wait of a
    `dist.Work` is native code: a line of Python that calls it is then the innermost. `source_line`: file and number ->
    that line."""
    waits_in, is_waiting = _waits_itself(frames, source_line), True
    for file, line, function in frames:
        if not re.match(_LIBRARY, file):
            return Place(waits_in, f"{os.path.basename(file)}:{line} in {function}")  # noqa: PTH119
        is_waiting = is_waiting and bool(re.match(_WAITS, file) or re.match(_DISPATCH, file))
        if is_waiting and re.match(_WAITS, file):
            waits_in = function
    return Place(waits_in, "")


FULL_BYTES = 1 << 16  # with less than this free, a write of ordinary size fails
END_BYTES = 8192
RECORD_BYTES = 1 << 20
RECORDED_CHARS = 200
NO_MEMORY = (
    b"MemoryError",
    b"can't start new thread",
    b"Cannot allocate memory",
    b"std::bad_alloc",
    b"DefaultCPUAllocator",
)  # what a process says last that may not have more address space
_NO_INPUT = rb"(?m)^(?:bdb\.BdbQuit|EOFError: EOF when reading a line)\s*\Z"


def explain_end(wait_status: int, log: str, global_rank: int, has_input: bool, recorded: str) -> str:
    """Return what else is known of a worker's bad end, for the failure report; empty when nothing is. `has_input`: the
    user's standard input belongs to it. `recorded`: file in which torch's `record` may have left its exception."""
    return (
        explain_full_disk(log)
        or explain_limit(wait_status, log)
        or ("" if has_input else explain_no_input(log, global_rank))
        or read_recorded_error(recorded)
    )


def explain_full_disk(path: str) -> str:
    """Return that the disk which holds a file is full; empty when it is not, or not known."""
    folder = Path(path).parent
    try:
        status = os.statvfs(path)
    except OSError:
        return "" if folder.exists() else f"its log directory was removed ({folder}): leave it there while the job runs"
    if not status.f_blocks:  # a file system that does not count
        return ""
    blocks = status.f_bavail if os.geteuid() else status.f_bfree  # what is kept back is for root
    is_full = blocks * status.f_frsize < FULL_BYTES or bool(status.f_files and not status.f_favail)
    return f"the disk of its log is full ({folder}): make room, or give another --log_dir" if is_full else ""


def explain_limit(wait_status: int, log: str) -> str:
    """Return which limit has ended a process whose last words are in `log`, and what to do; empty for none."""
    code = os.waitstatus_to_exitcode(wait_status)
    seconds, _ = resource.getrlimit(resource.RLIMIT_CPU)
    if seconds != resource.RLIM_INFINITY and -code in (signal.SIGXCPU, signal.SIGKILL):
        return f"ulimit -t {seconds}: it may use {seconds} s of CPU time; raise the limit (RLIMIT_CPU)"
    size, _ = resource.getrlimit(resource.RLIMIT_AS)
    if size != resource.RLIM_INFINITY and code and any(words in read_end(log, END_BYTES) for words in NO_MEMORY):
        return f"ulimit -v {size >> 10}: it may have {size >> 10} KiB of address space; raise the limit (RLIMIT_AS)"
    return ""


def explain_no_input(log: str, global_rank: int) -> str:
    """Return that a rank whose log ends so has no standard input; empty when that is not why."""
    is_why = re.search(_NO_INPUT, read_end(log, END_BYTES // 2))
    return f"its standard input is empty: --interactive={global_rank} gives it yours" if is_why else ""


def read_recorded_error(path: str) -> str:
    """Return the exception that torch's `record` (elastic's error_handler) has left, in a line; empty without."""
    try:
        message = json.loads(read_end(path, RECORD_BYTES))["message"]
        text = str(message["message"] if isinstance(message, dict) else message)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= RECORDED_CHARS else f"{line[:RECORDED_CHARS]} ..."


class MemoryKillWatch:
    """Remembers the counters of the moment it was made, and compares."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        own = [folders[0] for folders in group_folders("memory", root)]
        self._counters = [root / "proc/vmstat"]
        self._counters += [folder / name for folder in own for name in ("memory.events", "memory.oom_control")]
        self._begin_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        self._before = self._counts()

    def explain(self, pid: int) -> str:
        """Return what is known of a SIGKILL that msrun did not send to `pid`, for the failure report."""
        line = ""
        for stamp_s, text in _kernel_log(self._root / "dev/kmsg"):
            match = re.search(rf"Killed process {pid} \(.*?\)", text)
            if match and stamp_s >= self._begin_s:
                line = text[: match.end()]  # without the numbers after its name
        if line:
            return f"out of memory: the kernel's log says {line!r}"
        now = self._counts()
        grown = [path for path, count in now.items() if count > self._before.get(path, count)]
        if grown:
            return f"likely out of memory: the kernel's oom_kill counter rose ({grown[-1]})"
        if now:
            return "sent by somebody: the kernel has counted no out-of-memory kill since the job began"
        return "if you did not kill it, likely out of memory"

    def _counts(self) -> dict[str, int]:
        found = {}
        for path in self._counters:
            with contextlib.suppress(OSError, ValueError):
                if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                    found[str(path)] = int(match[1])
        return found


def _kernel_log(path: Path) -> Iterator[tuple[float, str]]:
    """Yield (seconds since boot, text) of every record that can be read now; nothing when it may not be read."""
    with contextlib.suppress(BlockingIOError, ValueError, IndexError, OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while True:
                with contextlib.suppress(BrokenPipeError):  # it was overwritten; the next read goes on behind it
                    data = os.read(descriptor, END_BYTES)
                    head, _, text = data.decode("utf-8", "replace").partition(";")
                    yield int(head.split(",")[2]) / 1e6, text.split("\n", 1)[0]
        finally:
            os.close(descriptor)
