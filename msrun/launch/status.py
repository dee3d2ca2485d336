"""What a job is doing or how it ended, from its log directory alone: the lock tells whether it lives, the plan who
takes part, the events what happened, logs and the progress board how far it came. As text: lines about the job, then a
row for each worker, or for each group of equal ones; the same as it goes on, as a table redrawn in place, as rows added
below, or as lines of JSON; and what its workers write. And `msrun stop` and `msrun drain`: the process that is
signalled is the one that holds the lock at that moment, known by its id and start time: never one that was given the
pid since.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from msrun import contract
from msrun.agent.own_file import create_own_file
from msrun.agent.processes.process_control import Pid, Usage, session_usage, signal_processes, start_time, wait_until
from msrun.agent.processes.progress_board import PROGRESS_BOARD, Progress, parse_record
from msrun.cluster.membership import WorkerState
from msrun.errors import ClusterError, UsageError, near_miss, refused_as
from msrun.launch.directory.log_directory import (
    EventsRecord,
    LockState,
    PlannedWorker,
    PlanRecord,
    WorkerRecord,
    parse_events,
    parse_number,
    parse_object,
    parse_plan,
    read_bytes,
    read_lock,
    require_job,
)
from msrun.launch.directory.worker_log import LineCutter, LogEnd, LogTail, read_log_end
from msrun.launch.output import describe_span, one_line, printable_bytes
from msrun.planning.hosts import fold_ranks, name_ranks
from msrun.planning.plan import render_columns
from msrun.planning.record import Record
from msrun.planning.spec import parse_tail

if TYPE_CHECKING:
    from rich.console import RenderableType

JUST_STARTING = "(just starting)"  # in the place of the id of a job that has not written it yet
NOT_STARTED = "not started"
LOST = "lost"  # what is said of a worker whose job is over and that was to start, or ran

_INTERRUPTS = frozenset(contract.EXIT_SIGNAL_BASE + signum for signum in (1, 2, 15))


class JobState(Enum):
    """What becomes of a job, in order."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "finished successfully"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    DIED = "launcher died"  # its launcher has ended and has recorded no end: killed, or the host went down


STATE_COLOURS = {
    JobState.ENDED: "green",
    JobState.RUNNING: "green",
    JobState.FAILED: "red",
    JobState.DIED: "red",
    JobState.INTERRUPTED: "yellow",
}


class WorkerRow(Record):
    """One worker as `--status` shows it."""

    global_rank: int
    host: str
    pid: int  # 0 when it has not started
    state: str
    log_at: float | None  # when it last wrote to its log, wall clock; None when it has written nothing
    step: int | None
    loss: float | None
    log_name: str = ""  # in the log directory; empty when the plan does not tell
    last_line: str = ""  # of its log; as the worker wrote it, so not for a terminal
    progress: Progress = field(default_factory=Progress)  # what a running worker on this host says of itself
    steps_per_s: float | None = None
    usage: Usage | None = None  # of a running worker on this host

    def waits_s(self, clock: float) -> float | None:
        """Return for how long it has been waiting for other ranks; None when it does not, or does not say."""
        return max(0.0, clock - self.progress.waiting_since) if self.progress.is_waiting else None


class JobStatus(Record):
    """One job at one moment."""

    job_id: str
    state: JobState
    reason: str  # why it is stopping, failed or was interrupted, or how it ended; may be empty
    exit_code: int | None  # what its launcher exited with, when the failure file tells
    hosts: tuple[str, ...]
    launcher_host: str
    launcher_pid: int
    run_time_s: float | None
    restarts: int
    log_dir: Path
    grace_s: float | None
    rows: tuple[WorkerRow, ...]
    notes: tuple[str, ...]  # which files could not be understood
    now: float  # wall clock, when this was read
    clock: float = 0.0  # the same moment of CLOCK_MONOTONIC

    @property
    def is_over(self) -> bool:
        return self.state not in (JobState.STARTING, JobState.RUNNING, JobState.STOPPING)

    @property
    def status_code(self) -> int:
        """What `msrun --status` exits with: 0 while the job runs and when it was successful, else 1."""
        return contract.EXIT_OK if not self.is_over or self.state is JobState.ENDED else 1

    def describe(self) -> str:
        return f"{self.state.value}: {self.reason}" if self.reason else self.state.value


def read_status(log_dir: Path, option: str = "--status") -> JobStatus:
    """Return the newest job of a log directory, or of its folder; `option`: whose value it is, for the UsageError."""
    log_dir = require_job(log_dir, option)
    with refused_as(f"{option} {log_dir}: cannot read", "only the job's owner may look", at=log_dir):
        lock = read_lock(log_dir)
        plan_data, events_data, failure_data = (
            read_bytes(log_dir / name) for name in (contract.PLAN_JSON, contract.EVENTS_JSONL, contract.FAILURE_JSON)
        )
    plan, record = parse_plan(plan_data or b""), lock.record
    job_id = record.job_id if record else plan.job_id if plan else ""
    failure = parse_object(failure_data or b"")
    damaged = {
        contract.LOCK_FILE: record is None and (log_dir / contract.LOCK_FILE).exists(),
        contract.PLAN_JSON: plan is None and plan_data is not None,
        contract.FAILURE_JSON: failure_data is not None and failure.get("job_id") != job_id,
    }
    failure = {} if damaged[contract.FAILURE_JSON] else failure
    notes = tuple(f"{name} is damaged" for name, is_damaged in damaged.items() if is_damaged)
    if record is None and plan is None and not lock.is_held:
        what = f"{' and '.join(notes)}, so the job cannot be told" if notes else "no job has used it"
        raise UsageError(f"{option} {log_dir}: {what}; give the --log_dir of a job")
    events = parse_events(events_data or b"")
    state, reason = decide_state(lock, events, failure)
    code = parse_number(failure.get("exit_code"))
    status = JobStatus(
        job_id=job_id or JUST_STARTING,
        state=state,
        reason=reason,
        exit_code=int(code) if code is not None else None,
        hosts=plan.hosts if plan else (record.host,) if record else (),
        launcher_host=record.host if record else "",
        launcher_pid=record.pid if record else lock.holder_pid or 0,
        run_time_s=None,
        restarts=events.restarts,
        log_dir=log_dir,
        grace_s=plan.grace_s if plan else None,
        rows=(),
        notes=notes,
        now=time.time(),
        clock=time.monotonic(),
    )
    rows = tuple(_build_rows(status, plan, events))
    begin, end = record.started_at if record else events.begin, status.now
    if not lock.is_held:  # then what was written last counts
        written = [row.log_at for row in rows if row.log_at is not None and events.over is None]
        end = max([*written, *([events.newest] if events.newest is not None else [])], default=math.nan)
    run_time_s = max(0.0, end - begin) if begin is not None and not math.isnan(end) else None
    return replace(status, rows=rows, run_time_s=run_time_s)


def decide_state(lock: LockState, events: EventsRecord, failure: dict[str, Any]) -> tuple[JobState, str]:
    """Return the state of a job and its reason. Pure. `failure`: what its failure file says, if there is one."""
    if lock.is_held:
        if events.over is not None or events.stopping is not None:
            return JobState.STOPPING, events.over if events.over is not None else events.stopping or ""
        return (JobState.RUNNING if events.is_running else JobState.STARTING), ""
    if failure:
        is_interrupt = failure.get("first_failure") is None and failure.get("exit_code") in _INTERRUPTS
        state = JobState.INTERRUPTED if is_interrupt else JobState.FAILED
        return state, str(failure.get("reason", ""))
    if lock.record is not None and lock.record.error:
        return JobState.FAILED, lock.record.error
    if events.over is None:
        return JobState.DIED, ""
    has_failed = events.stopping is not None or any(
        worker.state in (WorkerState.FAILED.value, WorkerState.STOPPED.value) for worker in events.workers.values()
    )
    return (JobState.FAILED if has_failed else JobState.ENDED), events.over


def _build_rows(status: JobStatus, plan: PlanRecord | None, events: EventsRecord) -> Iterator[WorkerRow]:
    planned = {worker.global_rank: worker for worker in plan.workers} if plan else {}
    board = b""
    if plan and not status.is_over:
        with contextlib.suppress(OSError, ValueError):  # gone with the job's end; a path that is none
            board = read_bytes(Path(plan.run_dir) / PROGRESS_BOARD) or b""
    used: dict[int, Usage] = {}
    here = socket.gethostname()
    if not status.is_over and status.launcher_host == here:
        running = {rank: w.pid for rank, w in events.workers.items() if w.pid and w.state == WorkerState.RUNNING.value}
        used = session_usage(pid for rank, pid in running.items() if rank in planned and planned[rank].host == here)
    for rank in sorted(planned.keys() | events.workers.keys()):
        one = planned.get(rank) or PlannedWorker(rank, status.launcher_host or "?", "")
        yield _build_row(status, one, events.workers.get(rank, WorkerRecord()), parse_record(board, rank), used)


def _build_row(
    status: JobStatus, planned: PlannedWorker, worker: WorkerRecord, told: Progress, used: Mapping[int, Usage]
) -> WorkerRow:
    state = worker.state
    if worker.how and state == WorkerState.FAILED.value:
        state = f"{state}: {worker.how}"
    if status.is_over:
        state = {WorkerState.RUNNING.value: LOST, WorkerState.PLANNED.value: NOT_STARTED}.get(state, state)
    log = read_log_end(status.log_dir / planned.log_name) if planned.log_name else LogEnd()
    log, usage = log.with_reported(told), used.get(worker.pid)
    told = told if state == WorkerState.RUNNING.value else Progress()
    return WorkerRow(
        *(planned.global_rank, planned.host, worker.pid, state, log.written_at, log.step, log.loss),
        *(planned.log_name, log.last_line, told, told.steps_per_s(status.clock)),
        usage if usage and usage.memory_bytes else None,
    )


Value = TypeVar("Value", int, float)
Row = Mapping[str, str]  # heading -> cell
MAX_ROWS = 64  # more workers are groups of equal host and state; more groups, of equal state alone
MAX_RANKS = 32  # the same as the job goes on: with one row for each host
MAX_RUNS = 6  # more runs of ranks than this are cut short
WAIT_S = 5.0  # a worker that has been waiting in a collective for this long is shown as one that waits
GAP = "  "
NONE = "-"
_COLOURS = {"red": ("failed", "lost"), "yellow": ("wait", "stopped"), "green": ("running", "done")}
"""Of a worker's state, by the words in it."""
_CODES = {"bold": 1, "red": 31, "green": 32, "yellow": 33}


def render_status(status: JobStatus, *, has_colours: bool = False) -> str:
    """Return the status without a last newline, each row on one line."""
    rows = _table(status, MAX_ROWS, _COLUMNS, lambda row: f"{row.host}\n{row.state}", lambda row: row.state)
    lines = render_columns({name: [row[name] for row in rows] for name in rows[0]}) if rows else []
    head = head_lines(status)
    if has_colours:
        head[0] = f"\x1b[{_CODES[STATE_COLOURS.get(status.state, 'bold')]}m{head[0]}\x1b[m"
        for index, colour in enumerate(map(_colour, rows), 1):
            if colour in ("red", "yellow"):
                lines[index] = f"\x1b[{_CODES[colour]}m{lines[index]}\x1b[m"
    return "\n".join([*head, *lines])


def _colour(row: Row) -> str:
    return next((one for one, words in _COLOURS.items() if any(word in row["state"] for word in words)), "")


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
    columns = {
        "job": [one_line(status.job_id) for status in found],
        "state": [one_line(status.describe()) for status in found],
        "time": [NONE if status.run_time_s is None else describe_span(status.run_time_s) for status in found],
        "workers": [str(len(status.rows)) for status in found],
        "hosts": [",".join(map(one_line, dict.fromkeys(status.hosts))) or NONE for status in found],
    }
    return "\n".join(render_columns(columns))


def _table(
    status: JobStatus,
    most: int,
    columns: Sequence[str],
    *keys: Callable[[WorkerRow], str],
    cores: Mapping[int, float] | None = None,
) -> list[Row]:
    """Return a row for each worker, or for those with an equal key, of the first that makes no more than `most`."""
    groups: dict[str, list[WorkerRow]] = {str(row.global_rank): [row] for row in status.rows}
    for key in keys:
        if len(groups) > most:
            groups = {}
            for row in status.rows:
                groups.setdefault(key(row), []).append(row)
    is_group = len(groups) < len(status.rows)
    return [_cells(group, status, columns, cores, is_group=is_group) for group in groups.values()]


def fold(rows: Iterable[WorkerRow]) -> str:
    runs = fold_ranks(row.global_rank for row in rows).split(", ")
    return ", ".join(runs if len(runs) <= MAX_RUNS else [*runs[: MAX_RUNS - 1], "...", runs[-1]])


def span_of(values: Sequence[Value | None], describe: Callable[[Value], str]) -> str:
    """Return the smallest and the largest of values, or the only one; NONE where none is known."""
    known = [value for value in values if value is not None]
    low, high = (describe(min(known)), describe(max(known))) if known else (NONE, NONE)
    return low if low == high else f"{low} to {high}"


_JOB_STATES = {JobState.ENDED: "succeeded", JobState.DIED: "died"}
_WORKER_STATES = {WorkerState.STOPPED.value: "stopped", NOT_STARTED: "not_started"}


def render_json(status: JobStatus) -> str:
    """Return the status as one JSON object on one line, in ASCII."""
    job = {
        "job_id": status.job_id,
        "state": _JOB_STATES.get(status.state, status.state.value),
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
    return json.dumps(job, allow_nan=False)


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


class LiveTable:
    """Makes the rows of one look after the other; it remembers the last one, for the share of a core in use."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}  # process id -> CPU seconds, and when

    def read(self, status: JobStatus) -> list[Row]:
        now = {row.pid: (row.usage.cpu_s, status.clock) for row in status.rows if row.usage}
        cores = {
            pid: max(0.0, (cpu_s - self._last[pid][0]) / (at - self._last[pid][1]))
            for pid, (cpu_s, at) in now.items()
            if pid in self._last and at > self._last[pid][1]
        }
        self._last = now
        return _table(status, MAX_RANKS, _LIVE_COLUMNS, lambda row: row.host, cores=cores)


_COLUMNS = ("pid", "state", "last log", "step", "loss")
_LIVE_COLUMNS = ("activity", "of steps", "steps/s", "live loss", "CPU", "memory", "last line")


def _cells(
    rows: Sequence[WorkerRow],
    status: JobStatus,
    columns: Sequence[str],
    cores: Mapping[int, float] | None,
    *,
    is_group: bool,
) -> Row:
    """Return ranks, host and these columns of a worker, or of a group; `cores`: share in use, by process id."""
    first, hosts = rows[0], sorted({row.host for row in rows})
    used = [cores[row.pid] for row in rows if row.pid in cores] if cores else []
    mib = sum(row.usage.memory_bytes for row in rows if row.usage) / (1 << 20)
    step, newest = span_of([row.step for row in rows], str), max(rows, key=lambda row: row.log_at or 0.0)
    ages = span_of([max(0.0, status.now - row.log_at) for row in rows if row.log_at is not None], describe_span)
    counts = Counter(_activity(row, status, is_long=not is_group) for row in rows)
    activity = ", ".join(f"{count} {state}" if is_group else state for state, count in counts.items())
    prefix = f"[{newest.global_rank}] " if is_group and newest.last_line else ""
    found = {
        "pid": ("workers", str(len(rows))) if is_group else ("pid", str(first.pid or NONE)),
        "state": ("state", one_line(first.state)),
        "activity": ("state", one_line(activity)),
        "last log": ("last log", ages if ages == NONE else f"{ages} ago"),
        "step": ("step", step),
        "of steps": ("step", f"{step}/{first.progress.total}" if first.progress.total and not is_group else step),
        "steps/s": ("steps/s", span_of([row.steps_per_s for row in rows], "{:.4g}".format)),
        "loss": ("loss", span_of([row.loss for row in rows], "{:.6g}".format)),
        "live loss": ("loss", span_of([row.loss for row in rows], "{:.4g}".format)),
        "CPU": ("CPU", f"{sum(used):.0%}" if used else NONE),
        "memory": ("memory", NONE if not mib else f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB"),
        "last line": ("last line", one_line(prefix + newest.last_line)),
    }
    host = one_line(hosts[0]) if len(hosts) == 1 else f"{len(hosts)} hosts"
    return {"ranks" if is_group else "rank": fold(rows), "host": host, **dict(found[name] for name in columns)}


def _activity(row: WorkerRow, status: JobStatus, *, is_long: bool) -> str:
    waits_s = row.waits_s(status.clock) or 0.0
    if row.state == WorkerState.RUNNING.value and waits_s >= WAIT_S:
        return f"waits {describe_span(waits_s)}" if is_long else "waiting"
    return row.state if is_long else row.state.partition(": ")[0]


TERMINAL_S = 1.0
PLAIN_S = 10.0  # how often the status is shown, unless told
LOOK_S = 1.0  # how often to look, at least, whether the job has ended
_WIDTHS = {"state": 8, "steps/s": 7, "loss": 9, "CPU": 5, "memory": 8}  # of the columns whose cells become longer
_NUMBERS = ("step", "steps/s", "loss", "CPU", "memory")
_VOLATILE = ("CPU", "memory")  # a row in which nothing else has changed is not shown again


def watch_status(log_dir: Path, interval_s: float | None, *, as_json: bool) -> int:
    """Show a job every `interval_s` (None: 1 s on a terminal and for JSON, else 10 s) until it has ended; return what
    `--status` exits with then (UsageError: as `read_status`)."""
    status = read_status(log_dir)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    is_table = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    usual_s = TERMINAL_S if as_json or is_table else PLAIN_S
    shown, due = None, 0.0
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(rich_table()) if is_table and not as_json else PlainRows().show
        while True:
            if status.is_over or status.state is not shown or time.monotonic() >= due:
                due = time.monotonic() + (interval_s or usual_s)
                shown = status.state
                _write([render_json(status)]) if as_json else show(status)
            if status.is_over:
                return status.status_code
            time.sleep(max(0.0, min(LOOK_S, due - time.monotonic())))
            status = read_status(status.log_dir)


def _write(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


class PlainRows:
    """A table to which rows are added: at first all, then those that have changed."""

    def __init__(self) -> None:
        self._table = LiveTable()
        self._widths: dict[str, int] = {}
        self._shown: dict[str, Row] = {}
        self._job_line = ""

    def show(self, status: JobStatus) -> None:
        head = head_lines(status)
        lines = [] if self._widths else head[1:]
        if head[0] != self._job_line:
            lines.insert(0, head[0])
            self._job_line = head[0]
        rows, moment = self._table.read(status), time.strftime("%H:%M:%S", time.localtime(status.now))
        changed = [{"time": moment, **row} for row in rows if self._shown.get(row[next(iter(row))]) != _lasting(row)]
        self._shown.update({row[next(iter(row))]: _lasting(row) for row in rows})
        is_first = not self._widths and rows
        for row in changed:
            for name, cell in row.items():
                self._widths[name] = max(len(cell), self._widths.get(name, _WIDTHS.get(name, len(name))))
        if is_first:
            changed.insert(0, {name: name for name in changed[0]})
        lines += [GAP.join(cell.ljust(self._widths[name]) for name, cell in row.items()).rstrip() for row in changed]
        _write(lines)


def _lasting(row: Row) -> Row:
    return {name: cell for name, cell in row.items() if name not in _VOLATILE}


@contextlib.contextmanager
def rich_table() -> Iterator[Callable[[JobStatus], None]]:
    """One table on a terminal, redrawn in place; the last one stays. The cursor stays visible, whatever ends us."""
    from rich.console import Console
    from rich.live import Live

    table, console = LiveTable(), Console()
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        console.show_cursor()
        yield lambda status: live.update(draw(status, table.read(status)), refresh=True)


def draw(status: JobStatus, rows: Sequence[Row]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="bold")
    for name in rows[0] if rows else ():
        justify = "right" if name in _NUMBERS else "left"
        table.add_column(name, no_wrap=name != "last line", justify=justify, min_width=_WIDTHS.get(name))  # type: ignore[arg-type]
    for row in rows:
        colours = {"state": _colour(row)}
        cells = (
            Text(cell, colours.get(name, ""), no_wrap=name == "last line", overflow="ellipsis")
            for name, cell in row.items()
        )
        table.add_row(*cells)
    styles = [STATE_COLOURS.get(status.state, "bold")]
    head = [
        Text(line, style, no_wrap=True, overflow="ellipsis")
        for line, style in itertools.zip_longest(head_lines(status), styles, fillvalue="")
    ]
    return Group(*head, table) if rows else Group(*head)


LOGS = "msrun logs"
LOGS_S = 0.2
TAIL_BYTES = 1 << 16  # in which the last lines of a log are looked for


def show_logs(log_dir: Path, ranks: str, *, lines: int, follows: bool) -> int:
    """Print the last lines of logs, with `follows` what comes, too; return what `--status` exits with (UsageError)."""
    status = read_status(log_dir, LOGS)
    log_dir = status.log_dir
    names = {
        row.global_rank: row.log_name or contract.worker_log_name("worker", row.global_rank) for row in status.rows
    }
    wanted = parse_tail(ranks, max(names, default=-1) + 1, "--ranks")
    if missing := [rank for rank in wanted if rank not in names]:
        raise UsageError(f"--ranks {ranks}: the job has no {name_ranks(missing)}; it has {name_ranks(sorted(names))}")
    with contextlib.ExitStack() as stack:
        logs = []
        for rank in wanted:
            apart = log_dir / contract.error_log_name(names[rank])
            paths = [path for path in (log_dir / names[rank], apart) if path != apart or apart.exists()]
            logs += [stack.enter_context(contextlib.closing(LogTail(rank, str(path), LineCutter))) for path in paths]

        def show(log: LogTail, pieces: Sequence[bytes]) -> None:
            head = f"[{log.global_rank}] ".encode() if len(wanted) > 1 else b""
            for piece in pieces:
                sys.stdout.buffer.write(head + printable_bytes(piece, keep_colours=True))
            sys.stdout.flush()

        for log in logs:
            is_cut = log.skip_to_last(TAIL_BYTES)
            pieces = log.read()[is_cut:]
            show(log, pieces[max(0, len(pieces) - lines) :])
        while follows and not status.is_over:
            time.sleep(LOGS_S)
            for log in logs:
                show(log, log.read())
            status = read_status(log_dir, LOGS)
        for log in logs:
            log.end()
            show(log, log.read())
    return status.status_code


DEFAULT_GRACE_S = 10.0  # for a job that has not written its plan yet
OVERTIME_S = 20.0  # how long past its grace a job may take to end
TAKEN_S = 15.0  # how long a launcher may take to see that a host is to leave


def stop_job(log_dir: Path, say: Callable[[str], None]) -> str:
    """End the job of a log directory and return how it ended (UsageError: no job; ClusterError: it does not end)."""
    launcher = None
    while launcher is None:
        status = read_status(log_dir, "--stop")
        if status.is_over:
            return f"job {status.job_id} had ended before: {status.describe()}"
        log_dir = status.log_dir
        launcher = _find_launcher(log_dir)
    try:
        os.kill(launcher, 0)
    except PermissionError:
        raise ClusterError(
            f"--stop {log_dir}: job {status.job_id} (pid {launcher}) is another user's; only its owner may end it"
        ) from None
    except ProcessLookupError:  # it has just ended
        pass
    for signum in (signal.SIGTERM, signal.SIGCONT):  # one that Ctrl-Z has stopped acts on TERM only when it goes on
        signal_processes([launcher], signum)
    limit_s = (status.grace_s if status.grace_s is not None else DEFAULT_GRACE_S) + OVERTIME_S
    say(f"msrun: stopping job {status.job_id} (pid {launcher}), for up to {limit_s:g} s")
    if not wait_until(lambda: start_time(launcher) != launcher.started_at, limit_s):
        raise ClusterError(
            f"--stop {log_dir}: job {status.job_id} has not ended within {limit_s:g} s; "
            f"kill -KILL {launcher} ends it without a record"
        )
    after = read_status(log_dir, "--stop")
    how = {JobState.ENDED: "finished successfully meanwhile"}.get(after.state, after.describe())
    return f"job {status.job_id} has ended: {how}"


def _find_launcher(log_dir: Path) -> Pid | None:
    """Return the launcher that holds the lock, or None when it has changed hands; ClusterError: of another host."""
    lock = read_lock(log_dir)
    pid = lock.holder_pid
    if pid is None:
        return None
    if pid <= 0 or (lock.record is not None and lock.record.host != socket.gethostname()):
        where = f"host {lock.record.host}" if lock.record is not None else "another host"
        raise ClusterError(
            f"--stop {log_dir}: {lock.describe()} belongs to {where}, this is {socket.gethostname()}; "
            "run msrun --stop there"
        )
    launcher = Pid(pid, start_time(pid))
    return launcher if launcher.started_at and read_lock(log_dir).holder_pid == pid else None


def drain_host(log_dir: Path, host: str) -> str:
    """Have a host leave the job, and return what was asked for (UsageError; ClusterError: it is not taken)."""
    status = read_status(log_dir, "msrun drain")
    log_dir = status.log_dir
    if status.is_over:
        raise UsageError(f"msrun drain {host}: job {status.job_id} is over: {status.describe()}")
    plan = parse_object(read_bytes(log_dir / contract.PLAN_JSON) or b"")
    names = [{one.get("name"), (one.get("agent") or {}).get("name")} - {None} for one in plan.get("hosts", ())]
    known = sorted(set().union(*names))
    if not any(host in own for own in names):
        raise UsageError(f"msrun drain {host}: the job has no such host{near_miss(host, known)}; {', '.join(known)}")
    if len(names) < 2:
        raise UsageError(f"msrun drain {host}: the job has no other host; msrun stop {log_dir} ends it")
    request = log_dir / contract.DRAIN / quote(host, safe="")
    request.parent.mkdir(mode=contract.DIRECTORY_MODE, exist_ok=True)
    os.close(create_own_file(request))
    if not wait_until(lambda: not request.exists(), TAKEN_S):
        request.unlink(missing_ok=True)
        raise ClusterError(f"msrun drain {host}: the launcher (pid {status.launcher_pid}) does not answer")
    return f"{host} leaves job {status.job_id}; msrun status {log_dir} shows how it goes on"
