"""What workers use of their host: processor time and memory of each worker's session."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """What the living processes of one session use."""

    cpu_s: float = 0.0
    """Processor seconds since they began."""
    memory_bytes: int = 0
    """Resident memory; what forked processes share counts in each."""


def session_usage(leaders: Iterable[int]) -> dict[int, Usage]:
    """Return what each leader's session uses; nothing of one that has ended. Source: proc(5), stat 6, 14, 15, 24."""
    wanted = set(leaders)
    used = dict.fromkeys(wanted, Usage())
    for entry in os.listdir("/proc"):  # noqa: PTH208 - one call, no Path object per process
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
                session = int(fields[3])
                if session in wanted:
                    so_far = used[session]
                    cpu_s = so_far.cpu_s + (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
                    used[session] = Usage(cpu_s, so_far.memory_bytes + int(fields[21]) * _PAGE_BYTES)
    return used
