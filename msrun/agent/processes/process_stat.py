"""What /proc/PID/stat says of processes: the one reader of it. Source: proc(5)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """One process at one moment."""

    pid: int
    state: str
    """One letter: R, S, D, T (stopped by a signal), t (by a debugger), Z (has ended), ..."""
    parent: int
    session: int
    flags: int
    """PF_* of linux/sched.h."""
    cpu_ticks: int
    """Of all its threads, in clock ticks."""
    started_at: int
    """In clock ticks since the machine was started."""
    resident_pages: int
    environment: tuple[int, int]
    """Where its first environment begins and ends in its memory; 0 where this process may not know."""


def read_stat(pid: int | str) -> ProcessStat | None:
    """Return what is said of a process; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - for thousands of processes
            number, _, rest = file.read().partition(b" ")
    except OSError:
        return None
    fields = rest.rpartition(b")")[2].split()  # the command's name may hold blanks and brackets; from field 3 on
    if len(fields) < 49:  # it ended while it was read
        return None
    return ProcessStat(
        pid=int(number),
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        flags=int(fields[6]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        started_at=int(fields[19]),
        resident_pages=int(fields[21]),
        environment=(int(fields[47]), int(fields[48])),
    )


def read_all_stats() -> Iterator[ProcessStat]:
    """Yield every process that can be seen."""
    for entry in os.listdir("/proc"):  # noqa: PTH208 - one call, no Path object per process
        if entry.isdigit() and (stat := read_stat(entry)) is not None:
            yield stat
