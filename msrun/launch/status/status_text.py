"""A job's status as text: a few lines about the job, then one row per worker, or one per group of equal ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msrun.cluster.membership import WorkerState
from msrun.launch.output import one_line
from msrun.launch.status.job_status import NOT_STARTED, STATE_COLOURS, JobState, JobStatus, WorkerRow
from msrun.planning.plan_text import render_columns
from msrun.planning.ranks import fold_ranks

if TYPE_CHECKING:
    from rich.table import Table

Value = TypeVar("Value", int, float)
Row = Mapping[str, str]
"""Heading -> cell."""
MAX_ROWS = 64
"""More workers than this are shown as groups of equal host and state; more groups than this, of equal state alone."""
MAX_RUNS = 6
"""More runs of ranks than this are cut short."""
GAP = "  "
NONE = "-"
_HOURS_S = 3600
_DAYS_S = 24 * _HOURS_S


def render_status(status: JobStatus, width: int | None = None) -> str:
    """Return the status without a last newline.

    Args:
        width: columns of the terminal that it is for; None = no terminal: plain columns, each row on one line.
    """
    are_groups = len(status.rows) > MAX_ROWS
    groups = {str(row.global_rank): [row] for row in status.rows}
    if are_groups:
        groups = group_rows(status.rows, lambda row: f"{row.host}\n{row.state}")
    if len(groups) > MAX_ROWS:
        groups = group_rows(status.rows, lambda row: row.state)
    head, rows = head_lines(status), [_row(rows, status.now, is_group=are_groups) for rows in groups.values()]
    if width is not None:
        return _render_rich(status, head, rows, width)
    return "\n".join(
        [*head, *(render_columns({name: [row[name] for row in rows] for name in rows[0]}) if rows else [])]
    )


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
    columns = {
        "job": [one_line(status.job_id) for status in found],
        "state": [one_line(status.describe()) for status in found],
        "time": [NONE if status.run_time_s is None else describe_span(status.run_time_s) for status in found],
        "workers": [str(len(status.rows)) for status in found],
        "hosts": [",".join(map(one_line, dict.fromkeys(status.hosts))) or NONE for status in found],
    }
    return "\n".join(render_columns(columns))


def _row(rows: Sequence[WorkerRow], now: float, *, is_group: bool) -> Row:
    """Return the cells of workers in one state."""
    hosts = sorted({row.host for row in rows})
    ages = span_of([max(0.0, now - row.log_at) for row in rows if row.log_at is not None], describe_span)
    return {
        "ranks" if is_group else "rank": fold(rows),
        "host": one_line(hosts[0]) if len(hosts) == 1 else f"{len(hosts)} hosts",
        **({"workers": str(len(rows))} if is_group else {"pid": str(rows[0].pid or NONE)}),
        "state": one_line(rows[0].state),
        "last log": ages if ages == NONE else f"{ages} ago",
        "step": span_of([row.step for row in rows], str),
        "loss": span_of([row.loss for row in rows], "{:.6g}".format),
    }


def group_rows(rows: Iterable[WorkerRow], key: Callable[[WorkerRow], str]) -> dict[str, list[WorkerRow]]:
    """Return workers by something that they have in common, in the order of each first one."""
    groups: dict[str, list[WorkerRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def fold(rows: Iterable[WorkerRow]) -> str:
    """Return the ranks of workers."""
    runs = fold_ranks(row.global_rank for row in rows).split(", ")
    return ", ".join(runs if len(runs) <= MAX_RUNS else [*runs[: MAX_RUNS - 1], "...", runs[-1]])


def span_of(values: Sequence[Value | None], describe: Callable[[Value], str]) -> str:
    """Return the smallest and the largest of values, or the only one; NONE where none is known."""
    known = [value for value in values if value is not None]
    low, high = (describe(min(known)), describe(max(known))) if known else (NONE, NONE)
    return low if low == high else f"{low} to {high}"


def _render_rich(status: JobStatus, head: Sequence[str], rows: Sequence[Row], width: int) -> str:
    import io

    from rich.console import Console
    from rich.text import Text

    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    for style, line in zip([STATE_COLOURS.get(status.state, "bold"), *[""] * len(head)], head, strict=False):
        console.print(Text(line, style=style), soft_wrap=True)
    if rows:
        table = make_table()
        for heading in rows[0]:
            table.add_column(heading)
        for row in rows:
            table.add_row(*map(Text, row.values()))
        console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.rstrip("\n")


def make_table() -> Table:
    """Return a table of rich's, without lines, and without columns yet."""
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="bold")


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
