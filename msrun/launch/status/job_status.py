"""`msrun --status LOG_DIR`: what a job is doing or how it ended, from its log directory alone: the lock tells whether
it lives, the plan who takes part, the events what happened, logs and the progress board how far it came.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.processes.process_control import Usage, session_usage
from msrun.agent.watch.progress_board import PROGRESS_BOARD, Progress, parse_record
from msrun.cluster.membership import WorkerState
from msrun.errors import UsageError
from msrun.launch.directory.jobs import require_job
from msrun.launch.directory.lock import LockState, parse_number, parse_object, read_lock
from msrun.launch.directory.log_directory import (
    EventsRecord,
    PlannedWorker,
    PlanRecord,
    WorkerRecord,
    parse_events,
    parse_plan,
    read_bytes,
)
from msrun.launch.directory.worker_log import LogEnd, read_log_end

JUST_STARTING = "(just starting)"
"""In the place of the id of a job that has not written it yet."""
NOT_STARTED = "not started"
LOST = "lost"
"""What is said of a worker whose job is over and that was to start, or ran."""

_INTERRUPTS = frozenset(contract.EXIT_SIGNAL_BASE + signum for signum in (1, 2, 15))


class JobState(Enum):
    """What becomes of a job, in order."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "finished successfully"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    DIED = "launcher died"
    """Its launcher has ended and has recorded no end: killed, or the host went down."""


STATE_COLOURS = {
    JobState.ENDED: "green",
    JobState.RUNNING: "green",
    JobState.FAILED: "red",
    JobState.DIED: "red",
    JobState.INTERRUPTED: "yellow",
}


@dataclass(frozen=True)
class WorkerRow:
    """One worker as `--status` shows it."""

    global_rank: int
    host: str
    pid: int
    """0 when it has not started."""
    state: str
    log_at: float | None
    """When it last wrote to its log, wall clock; None when it has written nothing."""
    step: int | None
    loss: float | None
    log_name: str = ""
    """In the log directory; empty when the plan does not tell."""
    last_line: str = ""
    """Of its log; as the worker wrote it, so not for a terminal."""
    progress: Progress = field(default_factory=Progress)
    """What a running worker on this host says of itself."""
    steps_per_s: float | None = None
    usage: Usage | None = None
    """Of a running worker on this host."""

    def waits_s(self, clock: float) -> float | None:
        """Return for how long it has been waiting for other ranks; None when it does not, or does not say."""
        return max(0.0, clock - self.progress.waiting_since) if self.progress.is_waiting else None


@dataclass(frozen=True)
class JobStatus:
    """One job at one moment."""

    job_id: str
    state: JobState
    reason: str
    """Why it is stopping, failed or was interrupted, or how it ended; may be empty."""
    exit_code: int | None
    """What its launcher exited with, when the failure file tells."""
    hosts: tuple[str, ...]
    launcher_host: str
    launcher_pid: int
    run_time_s: float | None
    restarts: int
    log_dir: Path
    grace_s: float | None
    rows: tuple[WorkerRow, ...]
    notes: tuple[str, ...]
    """Which files could not be understood."""
    now: float
    """Wall clock, when this was read."""
    clock: float = 0.0
    """The same moment of CLOCK_MONOTONIC."""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.state not in (JobState.STARTING, JobState.RUNNING, JobState.STOPPING)

    @property
    def status_code(self) -> int:
        """What `msrun --status` exits with: 0 while the job runs and when it was successful, else 1."""
        return contract.EXIT_OK if not self.is_over or self.state is JobState.ENDED else 1

    def describe(self) -> str:
        """Return state and reason on one line."""
        return f"{self.state.value}: {self.reason}" if self.reason else self.state.value


def read_status(log_dir: Path, option: str = "--status") -> JobStatus:
    """Return the newest job of a log directory, or the job whose own folder it is; `option`: whose value that is, for
    the UsageError when it is missing, cannot be read, or is no job's.
    """
    log_dir = require_job(log_dir, option)
    try:
        lock = read_lock(log_dir)
        plan_data, events_data, failure_data = (
            read_bytes(log_dir / name) for name in (contract.PLAN_JSON, contract.EVENTS_JSONL, contract.FAILURE_JSON)
        )
    except OSError as error:
        raise UsageError(
            f"{option} {log_dir}: cannot read {error.filename or log_dir} ({error.strerror}); "
            "only the job's owner may look"
        ) from None
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
