"""A job's status as text: a few lines about the job, then one row per worker, or one per group of equal ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from msrun.cluster.membership import WorkerState
from msrun.launch.printable import one_line
from msrun.launch.status.job_status import NOT_STARTED, STATE_COLOURS, JobState, JobStatus, WorkerRow
from msrun.planning.ranks import fold_ranks

Value = TypeVar("Value", int, float)
MAX_ROWS = 64
"""More workers than this are shown as groups of equal host and state; more groups than this, of equal state alone."""
MAX_RUNS = 6
"""More runs of ranks than this are cut short."""
HEADINGS = ("rank", "host", "pid", "state", "last log", "step", "loss")
GROUP_HEADINGS = ("ranks", "host", "workers", "state", "last log", "step", "loss")
GAP = "  "
_HOURS_S = 3600
_DAYS_S = 24 * _HOURS_S


def render_status(status: JobStatus, width: int | None = None) -> str:
    """Return the status without a last newline.

    Args:
        width: columns of the terminal that it is for; None = no terminal: plain columns, each row on one line.
    """
    head = head_lines(status)
    headings: tuple[str, ...]
    cells: list[tuple[str, ...]]
    if len(status.rows) > MAX_ROWS:
        headings, cells = GROUP_HEADINGS, _group_cells(status)
    else:
        headings, cells = HEADINGS, [_row_cells(row, status.now) for row in status.rows]
    if width is not None:
        return _render_rich(status, head, headings, cells, width)
    return "\n".join([*head, *(_columns([headings, *cells]) if cells else [])])


def head_lines(status: JobStatus) -> list[str]:
    """Return the lines about the job as a whole; the first names its state."""
    lines = [f"job {one_line(status.job_id)}: {one_line(status.describe())}"]
    facts = []
    if status.launcher_host:
        facts.append(f"launcher pid {status.launcher_pid} on {status.launcher_host}")
    hosts = list(dict.fromkeys(status.hosts))
    if hosts and hosts != [status.launcher_host]:
        facts.append(f"host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}")
    if status.run_time_s is not None:
        facts.append(f"{'ran for' if status.is_over else 'up'} {describe_span(status.run_time_s)}")
    if status.restarts:
        facts.append(f"started again {status.restarts} time{'s' if status.restarts > 1 else ''}")
    if status.exit_code is not None:
        facts.append(f"exit status {status.exit_code}")
    lines += [one_line(", ".join(facts))] if facts else []
    lines.append(f"logs in {one_line(str(status.log_dir))}")
    return lines + [f"note: {one_line(note)}" for note in status.notes]


def render_jobs(found: Sequence[JobStatus]) -> str:
    """Return a line for each job, without a last newline."""
    rows = [
        (
            one_line(status.job_id),
            one_line(status.describe()),
            "-" if status.run_time_s is None else describe_span(status.run_time_s),
            str(len(status.rows)),
            ",".join(map(one_line, dict.fromkeys(status.hosts))) or "-",
        )
        for status in found
    ]
    return "\n".join(_columns([("job", "state", "time", "workers", "hosts"), *rows]))


def _row_cells(row: WorkerRow, now: float) -> tuple[str, ...]:
    return (
        str(row.global_rank),
        one_line(row.host),
        str(row.pid) if row.pid else "-",
        one_line(row.state),
        f"{describe_span(max(0.0, now - row.log_at))} ago" if row.log_at is not None else "-",
        str(row.step) if row.step is not None else "-",
        f"{row.loss:.6g}" if row.loss is not None else "-",
    )


def _group_cells(status: JobStatus) -> list[tuple[str, ...]]:
    groups = _groups(status.rows, lambda row: row.host)
    if len(groups) > MAX_ROWS:
        groups = _groups(status.rows, lambda _: "")
    cells: list[tuple[str, ...]] = []
    for (_, state), rows in groups.items():
        names = sorted({row.host for row in rows})
        ages = [max(0.0, status.now - row.log_at) for row in rows if row.log_at is not None]
        cells.append(
            (
                _fold(row.global_rank for row in rows),
                one_line(names[0]) if len(names) == 1 else f"{len(names)} hosts",
                str(len(rows)),
                one_line(state),
                f"{_range(ages, describe_span)} ago" if ages else "-",
                _range([row.step for row in rows if row.step is not None], str),
                _range([row.loss for row in rows if row.loss is not None], lambda loss: f"{loss:.6g}"),
            )
        )
    return cells


def _fold(ranks: Iterable[int]) -> str:
    runs = fold_ranks(ranks).split(", ")
    return ", ".join(runs if len(runs) <= MAX_RUNS else [*runs[: MAX_RUNS - 1], "...", runs[-1]])


def _groups(rows: Iterable[WorkerRow], host_of: Callable[[WorkerRow], str]) -> dict[tuple[str, str], list[WorkerRow]]:
    groups: dict[tuple[str, str], list[WorkerRow]] = {}
    for row in rows:
        groups.setdefault((host_of(row), row.state), []).append(row)
    return groups


def _range(values: Sequence[Value], describe: Callable[[Value], str]) -> str:
    if not values:
        return "-"
    low, high = describe(min(values)), describe(max(values))
    return low if low == high else f"{low} to {high}"


def _columns(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _render_rich(
    status: JobStatus, head: Sequence[str], headings: Sequence[str], cells: Sequence[Sequence[str]], width: int
) -> str:
    import io

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    console.print(Text(head[0], style=STATE_COLOURS.get(status.state, "bold")), soft_wrap=True)
    for line in head[1:]:
        console.print(Text(line), soft_wrap=True)
    if cells:
        table = Table(*headings, box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="bold")
        for row in cells:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.rstrip("\n")


def describe_span(seconds: float) -> str:
    """Return a span of time in words: 0.4 s, 12 s, 3 min 5 s, 2 h 0 min, 3 d 4 h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = int(max(seconds, 10))
    if whole < 60:
        return f"{whole} s"
    if whole < _HOURS_S:
        return f"{whole // 60} min {whole % 60} s"
    if whole < _DAYS_S:
        return f"{whole // _HOURS_S} h {whole % _HOURS_S // 60} min"
    return f"{whole // _DAYS_S} d {whole % _DAYS_S // _HOURS_S} h"


JOB_STATES = {
    JobState.STARTING: "starting",
    JobState.RUNNING: "running",
    JobState.STOPPING: "stopping",
    JobState.ENDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.INTERRUPTED: "interrupted",
    JobState.DIED: "died",
}
_WORKER_STATES = {WorkerState.STOPPED.value: "stopped", NOT_STARTED: "not_started"}


def render_json(status: JobStatus) -> str:
    """Return the status as one JSON object on one line, in ASCII."""
    return json.dumps(_job(status), allow_nan=False)


def _job(status: JobStatus) -> dict[str, Any]:
    return {
        "job_id": status.job_id,
        "state": JOB_STATES[status.state],
        "reason": status.reason,
        "exit_code": status.exit_code if status.state is not JobState.ENDED else 0,
        "time": round(status.now, 3),
        "run_time_s": _rounded(status.run_time_s),
        "restarts": status.restarts,
        "log_dir": str(status.log_dir),
        "hosts": list(dict.fromkeys(status.hosts)),
        "launcher": {"host": status.launcher_host, "pid": status.launcher_pid},
        "notes": list(status.notes),
        "workers": [_worker(status, row) for row in status.rows],
    }


def _worker(status: JobStatus, row: WorkerRow) -> dict[str, Any]:
    told, usage = row.progress, row.usage
    state, _, how = row.state.partition(": ")
    return {
        "global_rank": row.global_rank,
        "host": row.host,
        "pid": row.pid or None,
        "state": _WORKER_STATES.get(state, state),
        "how": how,
        "step": row.step,
        "total_steps": told.total or None,
        "steps_per_s": _rounded(row.steps_per_s),
        "loss": row.loss if row.loss is not None and math.isfinite(row.loss) else None,
        "doing": told.describe(status.clock),
        "waits_s": _rounded(row.waits_s(status.clock)),
        "cpu_s": _rounded(usage.cpu_s) if usage else None,
        "memory_bytes": usage.memory_bytes if usage else None,
        "log": str(status.log_dir / row.log_name) if row.log_name else None,
        "log_time": _rounded(row.log_at),
        "last_line": row.last_line,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
