"""The cells of the live table: one row for each rank, or for each host when there are many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from msrun.cluster.membership import WorkerState
from msrun.launch.printable import one_line
from msrun.launch.status.job_status import JobStatus, WorkerRow
from msrun.launch.status.status_text import describe_span
from msrun.planning.ranks import fold_ranks

Value = TypeVar("Value", int, float)
Cells = tuple[str, ...]
MAX_RANKS = 32
"""More workers than this are shown with one row for each host."""
HEADINGS = ("rank", "host", "state", "step", "steps/s", "loss", "CPU", "memory", "last line")
HOST_HEADINGS = ("ranks", *HEADINGS[1:])
WAIT_S = 5.0
"""A worker that has been waiting in a collective for this long is shown as one that waits."""
NONE = "-"


class LiveTable:
    """Makes the cells of one look after the other; it remembers the last one, for the share of a core in use."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}
        """Process id -> processor seconds, and the moment when they were read."""

    def read(self, status: JobStatus) -> tuple[Cells, list[Cells]]:
        """Return the headings, and the cells of every row."""
        cores = self._cores(status)
        if len(status.rows) <= MAX_RANKS:
            return HEADINGS, [_rank_cells(row, status, cores) for row in status.rows]
        hosts: dict[str, list[WorkerRow]] = {}
        for row in status.rows:
            hosts.setdefault(row.host, []).append(row)
        return HOST_HEADINGS, [_host_cells(host, rows, status, cores) for host, rows in hosts.items()]

    def _cores(self, status: JobStatus) -> dict[int, float]:
        """Return process id -> cores in use since the last look."""
        now = {row.pid: (row.usage.cpu_s, status.clock) for row in status.rows if row.usage}
        cores = {
            pid: max(0.0, (cpu_s - self._last[pid][0]) / (at - self._last[pid][1]))
            for pid, (cpu_s, at) in now.items()
            if pid in self._last and at > self._last[pid][1]
        }
        self._last = now
        return cores


def _rank_cells(row: WorkerRow, status: JobStatus, cores: Mapping[int, float]) -> Cells:
    step = NONE if row.step is None else str(row.step)
    return (
        str(row.global_rank),
        one_line(row.host),
        one_line(_state(row, status)),
        f"{step}/{row.progress.total}" if row.progress.total else step,
        _number(row.steps_per_s),
        _number(row.loss),
        f"{cores[row.pid]:.0%}" if row.pid in cores else NONE,
        describe_size(row.usage.memory_bytes) if row.usage else NONE,
        one_line(row.last_line),
    )


def _host_cells(host: str, rows: Sequence[WorkerRow], status: JobStatus, cores: Mapping[int, float]) -> Cells:
    states: dict[str, int] = {}
    for row in rows:
        state = "waiting" if _is_waiting(row, status) else row.state.partition(": ")[0]
        states[state] = states.get(state, 0) + 1
    used = [cores[row.pid] for row in rows if row.pid in cores]
    sizes = [row.usage.memory_bytes for row in rows if row.usage]
    newest = max(rows, key=lambda row: row.log_at or 0.0)
    return (
        fold_ranks(row.global_rank for row in rows),
        one_line(host),
        one_line(", ".join(f"{count} {state}" for state, count in states.items())),
        _range([row.step for row in rows if row.step is not None], str),
        _range([row.steps_per_s for row in rows if row.steps_per_s is not None], _number),
        _range([row.loss for row in rows if row.loss is not None], _number),
        f"{sum(used):.0%}" if used else NONE,
        describe_size(sum(sizes)) if sizes else NONE,
        one_line(f"[{newest.global_rank}] {newest.last_line}") if newest.last_line else "",
    )


def _state(row: WorkerRow, status: JobStatus) -> str:
    return f"waits {describe_span(row.waits_s(status.clock) or 0.0)}" if _is_waiting(row, status) else row.state


def _is_waiting(row: WorkerRow, status: JobStatus) -> bool:
    return row.state == WorkerState.RUNNING.value and (row.waits_s(status.clock) or 0.0) >= WAIT_S


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"


def _range(values: Iterable[Value], describe: Callable[[Value], str]) -> str:
    found = list(values)
    if not found:
        return NONE
    low, high = describe(min(found)), describe(max(found))
    return low if low == high else f"{low} to {high}"


def describe_size(count: int) -> str:
    """Return a number of bytes in words: 12 MiB, 1.5 GiB."""
    mib = count / (1 << 20)
    return f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB"
