"""Why a worker ended, where its log cannot say so: a full disk, a limit of the shell, the kernel's killer, no input."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import time
from pathlib import Path

from msrun.agent.host.cgroups import group_folders
from msrun.agent.logs.own_file import read_end

FULL_BYTES = 1 << 16  # with less than this free, a write of ordinary size fails


def explain_full_disk(path: str) -> str:
    """Return that the disk which holds a file is full, for the failure report; empty when it is not, or not known."""
    try:
        status = os.statvfs(path)
    except OSError:
        parent = Path(path).parent
        return "" if parent.exists() else f"its log directory was removed ({parent}): leave it there while the job runs"
    if not status.f_blocks:  # a file system that does not count
        return ""
    blocks = status.f_bavail if os.geteuid() else status.f_bfree  # what is kept back is for root
    is_full = blocks * status.f_frsize < FULL_BYTES or bool(status.f_files and not status.f_favail)
    return f"the disk of its log is full ({Path(path).parent}): make room, or give another --log_dir" if is_full else ""


END_BYTES = 8192
NO_MEMORY = (
    b"MemoryError",
    b"can't start new thread",
    b"Cannot allocate memory",
    b"std::bad_alloc",
    b"DefaultCPUAllocator",
)
"""What a process says last that may not have more address space."""


def explain_limit(wait_status: int, log: str) -> str:
    """Return which limit has ended a process, and what to do; empty when none is set, or nothing speaks for it. `log`:
    file that holds its last words.
    """
    code = os.waitstatus_to_exitcode(wait_status)
    seconds, _ = resource.getrlimit(resource.RLIMIT_CPU)
    if seconds != resource.RLIM_INFINITY and -code in (signal.SIGXCPU, signal.SIGKILL):
        return f"ulimit -t {seconds}: it may use {seconds} s of CPU time; raise the limit (RLIMIT_CPU)"
    size, _ = resource.getrlimit(resource.RLIMIT_AS)
    if size != resource.RLIM_INFINITY and code and any(words in _last_words(log) for words in NO_MEMORY):
        return f"ulimit -v {size >> 10}: it may have {size >> 10} KiB of address space; raise the limit (RLIMIT_AS)"
    return ""


def _last_words(log: str) -> bytes:
    return read_end(log, END_BYTES)


READ_BYTES = 8192


class MemoryKillWatch:
    """Remembers the counters of the moment it was made, and compares."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._counters = [root / "proc/vmstat", *_cgroup_counters(root)]
        self._begin_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        self._before = self._counts()

    def explain(self, pid: int) -> str:
        """Return what is known of a SIGKILL that msrun did not send to `pid`, for the failure report."""
        line = self._kernel_line(pid)
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
                match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
                if match:
                    found[str(path)] = int(match[1])
        return found

    def _kernel_line(self, pid: int) -> str:
        """Return the kernel log's line about this process's end, without the numbers after its name."""
        found = ""
        for stamp_s, text in _kernel_log(self._root / "dev/kmsg"):
            match = re.search(rf"Killed process {pid} \(.*?\)", text)
            if match and stamp_s >= self._begin_s:
                found = text[: match.end()]
        return found


def _cgroup_counters(root: Path) -> list[Path]:
    """Return the counter files of this process's memory cgroup, v1 or v2."""
    own = [folders[0] for folders in group_folders("memory", root)]
    found = [folder / name for folder in own for name in ("memory.events", "memory.oom_control")]
    return [path for path in found if path.is_file()]


def _kernel_log(path: Path) -> list[tuple[float, str]]:
    """Return (seconds since boot, text) of every record that can be read now; empty when it may not be read."""
    records = []
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while True:
                try:
                    data = os.read(descriptor, READ_BYTES)
                except BrokenPipeError:  # the record was overwritten meanwhile; the next read goes on behind it
                    continue
                if not data:
                    break
                head, _, text = data.decode("utf-8", "replace").partition(";")
                records.append((int(head.split(",")[2]) / 1e6, text.split("\n", 1)[0]))
        except (BlockingIOError, ValueError, IndexError):
            pass
        finally:
            os.close(descriptor)
    return records


LOOK_BYTES = 4096
_NO_INPUT = re.compile(rb"^(?:bdb\.BdbQuit|EOFError: EOF when reading a line)\s*\Z", re.MULTILINE)


def explain_no_input(log: str, global_rank: int, has_input: bool) -> str:
    """Return that a rank whose log ends so has no standard input, for the failure report; empty when that is not why.
    `has_input`: the user's standard input belongs to it.
    """
    if has_input:
        return ""
    end = read_end(log, LOOK_BYTES)
    return f"its standard input is empty: --interactive={global_rank} gives it yours" if _NO_INPUT.search(end) else ""


RECORD_BYTES = 1 << 20
RECORDED_CHARS = 200


def read_recorded_error(path: str) -> str:
    """Return the exception that torch's `record` has left for the failure report, in a line; empty without one.

    Source: torch.distributed.elastic.multiprocessing.errors.error_handler.
    """
    try:
        record = json.loads(read_end(path, RECORD_BYTES))
        message = record["message"]
        text = str(message["message"] if isinstance(message, dict) else message)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= RECORDED_CHARS else f"{line[:RECORDED_CHARS]} ..."
