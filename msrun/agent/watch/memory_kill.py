"""Evidence of the kernel's out-of-memory killer: was it the kernel that sent SIGKILL, and to whom?

Sources: the kernel log, which names the process (readable by root, usually); the counter `oom_kill` of this process's
memory cgroup (v2: memory.events; v1: memory.oom_control) and of the whole machine (/proc/vmstat, since Linux 4.13).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from msrun.agent.host.cgroups import group_folders

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
