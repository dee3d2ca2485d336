"""How much of this host is left for a job: memory, file descriptors, processes. Linux only; reads, never writes."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from msrun.agent.host.cgroups import group_folders

MIB = 1 << 20
GIB = 1 << 30


def format_bytes(size_bytes: int) -> str:
    """Return a size with a unit that suits it."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes // MIB} MiB"


def free_disk_bytes(folder: Path) -> int | None:
    """Return what a user may still write where `folder` is; 0 too when no file can be made; None when not known."""
    status = os.statvfs(folder)
    if not status.f_blocks:  # a file system that does not count
        return None
    return 0 if status.f_files and not status.f_favail else status.f_bavail * status.f_frsize


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that new processes can have: of the host, and of the control groups above this process.

    The page cache of a group that was not used lately counts as free, as it does in the host's MemAvailable.
    Source: proc(5); the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    candidates = list(_cgroup_memory(root))
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
        if match:
            candidates.append(int(match[1]) * 1024)
    return min(candidates, default=None)


def _cgroup_memory(root: Path) -> Iterator[int]:
    for folder in chain.from_iterable(group_folders("memory", root)):
        for limit, used, reclaimable in (
            ("memory.max", "memory.current", r"^inactive_file (\d+)$"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", r"^total_inactive_file (\d+)$"),
        ):
            with contextlib.suppress(OSError, ValueError):
                free = int((folder / limit).read_text()) - int((folder / used).read_text())
                match = re.search(reclaimable, (folder / "memory.stat").read_text(), re.MULTILINE)
                yield max(0, free + (int(match[1]) if match else 0))


def open_file_limits() -> tuple[int, int]:
    """Return how many file descriptors a worker may have, and a process of msrun, which raises its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _finite(soft), _finite(hard)


def _finite(limit: int) -> int:
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit


def free_processes(root: Path = Path("/")) -> int | None:
    """Return how many threads and processes this user may still start; None = no limit."""
    free = []
    for folder in chain.from_iterable(group_folders("pids", root)):
        with contextlib.suppress(OSError, ValueError):
            free.append(int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text()))
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is not held to it
        free.append(soft - _threads_of_user(root))
    return max(0, min(free)) if free else None


def _threads_of_user(root: Path) -> int:
    uid = os.geteuid()
    count = 0
    for entry in (root / "proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that has gone
            if entry.stat().st_uid == uid:
                match = re.search(r"^Threads:\s+(\d+)$", (entry / "status").read_text(), re.MULTILINE)
                count += int(match[1]) if match else 1
    return count
