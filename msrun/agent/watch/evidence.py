"""Why a worker ended, where its log cannot say so: a full disk, a limit of the shell, the kernel's killer, no input."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from msrun.agent.host.host_facts import group_folders
from msrun.agent.logs.own_file import read_end

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
)
"""What a process says last that may not have more address space."""
_NO_INPUT = re.compile(rb"^(?:bdb\.BdbQuit|EOFError: EOF when reading a line)\s*\Z", re.MULTILINE)


def explain_end(wait_status: int, log: str, global_rank: int, has_input: bool, recorded: str) -> str:
    """Return what else is known of a worker's bad end, for the failure report; empty when nothing is. `has_input`: the
    user's standard input belongs to it. `recorded`: file in which torch's `record` may have left its exception.
    """
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
    """Return which limit has ended a process whose last words are in `log`, and what to do; empty when none is set, or
    nothing speaks for it.
    """
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
    is_why = _NO_INPUT.search(read_end(log, END_BYTES // 2))
    return f"its standard input is empty: --interactive={global_rank} gives it yours" if is_why else ""


def read_recorded_error(path: str) -> str:
    """Return the exception that torch's `record` has left, in a line; empty without one. Source:
    torch.distributed.elastic.multiprocessing.errors.error_handler.
    """
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
                    if not data:
                        break
                    head, _, text = data.decode("utf-8", "replace").partition(";")
                    yield int(head.split(",")[2]) / 1e6, text.split("\n", 1)[0]
        finally:
            os.close(descriptor)
