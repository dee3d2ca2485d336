"""`msrun --status LOG_DIR`: what a job is doing or how it ended, seen from its log directory alone.

Nothing is written, nothing is asked of the launcher: the lock tells whether it lives, the plan who takes part, the
events what happened, the failure file why it ended, the logs and the progress board how far it came.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.logs.rotated_log import rotated_path
from msrun.agent.processes.process_control import Usage, session_usage
from msrun.agent.watch.progress_board import PROGRESS_BOARD, Progress, parse_record
from msrun.cluster.membership import WorkerState
from msrun.errors import UsageError
from msrun.launch.directory.job_record import (
    EventsRecord,
    PlannedWorker,
    PlanRecord,
    parse_events,
    parse_plan,
    read_bytes,
)
from msrun.launch.directory.jobs import find_job
from msrun.launch.directory.lock import LockState, parse_number, parse_object, read_lock
from msrun.launch.directory.worker_log import LOSS_BYTES, last_line, newest_loss, parse_step, read_tail

JUST_STARTING = "(just starting)"
"""In the place of the id of a job that has not written it yet."""
NOT_STARTED = "not started"
LOST = "lost"
"""What is said of a worker whose job is over and that was to start, or ran."""
NOTHING_TOLD = Progress()

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
    progress: Progress = NOTHING_TOLD
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


@dataclass(frozen=True)
class _Files:
    """Everything that was read, of one job."""

    lock: LockState
    plan: PlanRecord | None
    events: EventsRecord
    failure: dict[str, Any]
    notes: tuple[str, ...]


def read_status(log_dir: Path, option: str = "--status") -> JobStatus:
    """Return the newest job of a log directory, or the job whose own folder it is.

    Args:
        option: whose value the directory is, for errors.

    Raises:
        UsageError: the directory is missing, cannot be read, or is no job's.
    """
    log_dir = find_job(log_dir)
    if not log_dir.is_dir():
        what = "is a file" if log_dir.exists() else "no such directory"
        raise UsageError(f"{option} {log_dir}: {what}; give the --log_dir of a job")
    try:
        files = _read_files(log_dir)
    except OSError as error:
        raise UsageError(
            f"{option} {log_dir}: cannot read {error.filename or log_dir} ({error.strerror}); "
            "only the job's owner may look"
        ) from None
    if files.lock.record is None and files.plan is None and not files.lock.is_held:
        what = f"{' and '.join(files.notes)}, so the job cannot be told" if files.notes else "no job has used it"
        raise UsageError(f"{option} {log_dir}: {what}; give the --log_dir of a job")
    return _build_status(log_dir, files)


def _read_files(log_dir: Path) -> _Files:
    lock = read_lock(log_dir)
    plan_data = read_bytes(log_dir / contract.PLAN_JSON)
    plan = parse_plan(plan_data) if plan_data is not None else None
    notes = []
    if lock.record is None and (log_dir / contract.LOCK_FILE).exists():
        notes.append(f"{contract.LOCK_FILE} is damaged")
    if plan is None and plan_data is not None:
        notes.append(f"{contract.PLAN_JSON} is damaged")
    failure_data = read_bytes(log_dir / contract.FAILURE_JSON)
    failure = parse_object(failure_data) if failure_data is not None else {}
    job_id = lock.record.job_id if lock.record else plan.job_id if plan else ""
    if failure_data is not None and failure.get("job_id") != job_id:
        notes.append(f"{contract.FAILURE_JSON} is damaged")
        failure = {}
    events = parse_events(read_bytes(log_dir / contract.EVENTS_JSONL) or b"")
    return _Files(lock, plan, events, failure, tuple(notes))


def decide_state(lock: LockState, events: EventsRecord, failure: dict[str, Any]) -> tuple[JobState, str]:
    """Return the state of a job and its reason. Pure.

    Args:
        failure: content of the failure file of this job; empty when there is none.
    """
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


def _build_status(log_dir: Path, files: _Files) -> JobStatus:
    lock, plan, events = files.lock, files.plan, files.events
    record = lock.record
    state, reason = decide_state(lock, events, files.failure)
    now = time.time()
    code = parse_number(files.failure.get("exit_code"))
    status = JobStatus(
        job_id=record.job_id if record else plan.job_id if plan else JUST_STARTING,
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
        notes=files.notes,
        now=now,
        clock=time.monotonic(),
    )
    rows = tuple(_build_rows(status, plan, events))
    begin = record.started_at if record else events.begin
    end = now if lock.is_held else _last_sign_of_life(events, rows)
    run_time_s = max(0.0, end - begin) if begin is not None and end is not None else None
    return replace(status, rows=rows, run_time_s=run_time_s)


def _last_sign_of_life(events: EventsRecord, rows: tuple[WorkerRow, ...]) -> float | None:
    if events.over is not None:
        return events.newest
    moments = [row.log_at for row in rows if row.log_at is not None]
    return max([*moments, *([events.newest] if events.newest is not None else [])], default=None)


def _build_rows(status: JobStatus, plan: PlanRecord | None, events: EventsRecord) -> list[WorkerRow]:
    planned = {worker.global_rank: worker for worker in plan.workers} if plan else {}
    board = _read_board(plan) if plan and not status.is_over else b""
    used = _read_usage(status, planned, events)
    ranks = sorted(planned.keys() | events.workers.keys())
    unknown = status.launcher_host or "?"
    return [
        _build_row(
            status, planned.get(rank) or PlannedWorker(rank, unknown, ""), events, parse_record(board, rank), used
        )
        for rank in ranks
    ]


def _read_usage(status: JobStatus, planned: Mapping[int, PlannedWorker], events: EventsRecord) -> dict[int, Usage]:
    """Return what the running workers of this host use, by their process ids."""
    here = socket.gethostname()
    if status.is_over or status.launcher_host != here:
        return {}
    running = {rank: w.pid for rank, w in events.workers.items() if w.pid and w.state == WorkerState.RUNNING.value}
    used = session_usage(pid for rank, pid in running.items() if rank in planned and planned[rank].host == here)
    return {pid: usage for pid, usage in used.items() if usage.memory_bytes}


def _build_row(
    status: JobStatus,
    planned: PlannedWorker,
    events: EventsRecord,
    progress: Progress,
    used: Mapping[int, Usage],
) -> WorkerRow:
    worker = events.workers.get(planned.global_rank)
    state = worker.state if worker else WorkerState.PLANNED.value
    if worker and worker.how and state == WorkerState.FAILED.value:
        state = f"{state}: {worker.how}"
    if status.is_over:
        state = {WorkerState.RUNNING.value: LOST, WorkerState.PLANNED.value: NOT_STARTED}.get(state, state)
    log = _read_log(status.log_dir / planned.log_name) if planned.log_name else _Log()
    step, loss = log.step, log.loss
    if progress.steps:
        step = progress.steps or step
        loss = progress.loss if math.isfinite(progress.loss) else loss
    pid = worker.pid if worker else 0
    is_running = state == WorkerState.RUNNING.value
    return WorkerRow(
        planned.global_rank,
        planned.host,
        pid,
        state,
        log.written_at,
        step,
        loss,
        planned.log_name,
        log.last_line,
        progress if is_running else NOTHING_TOLD,
        progress.steps_per_s(status.clock) if is_running else None,
        used.get(pid),
    )


@dataclass(frozen=True)
class _Log:
    """What the end of a worker's log tells."""

    written_at: float | None = None
    step: int | None = None
    loss: float | None = None
    last_line: str = ""


def _read_log(path: Path) -> _Log:
    try:
        found = path.lstat()
    except OSError:
        return _Log()
    was_rotated = Path(rotated_path(str(path), 1)).exists()
    if not path.is_file() or not (found.st_size or was_rotated):
        return _Log()
    tail = read_tail(path, LOSS_BYTES)
    try:
        loss = float(newest_loss(path))
    except ValueError:
        loss = None
    return _Log(found.st_mtime, parse_step(tail), loss, last_line(tail))


def _read_board(plan: PlanRecord) -> bytes:
    try:
        return read_bytes(Path(plan.run_dir) / PROGRESS_BOARD) or b""
    except (OSError, ValueError):  # gone with the job's end; a path that is none
        return b""
