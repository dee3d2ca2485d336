"""What workers use of their host: processor time and memory of each worker's session."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from msrun.agent.processes.process_stat import read_all_stats

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
    """Return what each leader's session uses; nothing of one that has ended."""
    used = dict.fromkeys(leaders, Usage())
    for stat in read_all_stats():
        if (so_far := used.get(stat.session)) is not None:
            cpu_s = so_far.cpu_s + stat.cpu_ticks / _TICKS_PER_S
            used[stat.session] = Usage(cpu_s, so_far.memory_bytes + stat.resident_pages * _PAGE_BYTES)
    return used
