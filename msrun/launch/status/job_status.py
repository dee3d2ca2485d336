"""What a job is doing or how it ended, from its log directory alone: the lock tells whether it lives, the plan who
takes part, the events what happened, logs and the progress board how far it came. And `msrun stop` and `msrun drain`:
the process that is signalled is the one that holds the lock at that moment, known by its id and start time: never one
that was given the pid since.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msrun import contract
from msrun.agent.own_file import create_own_file
from msrun.agent.processes.process_control import Pid, Usage, session_usage, signal_processes, start_time
from msrun.agent.processes.progress_board import PROGRESS_BOARD, Progress, parse_record
from msrun.cluster.membership import WorkerState
from msrun.errors import ClusterError, UsageError, near_miss
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
from msrun.launch.directory.worker_log import LogEnd, read_log_end

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


@dataclass(frozen=True)
class WorkerRow:
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


@dataclass(frozen=True)
class JobStatus:
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


DEFAULT_GRACE_S = 10.0  # for a job that has not written its plan yet
OVERTIME_S = 20.0  # how long past its grace a job may take to end
TAKEN_S = 15.0  # how long a launcher may take to see that a host is to leave
POLL_S = 0.05


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
    end = time.monotonic() + limit_s
    while start_time(launcher) == launcher.started_at:
        if time.monotonic() > end:
            raise ClusterError(
                f"--stop {log_dir}: job {status.job_id} has not ended within {limit_s:g} s; "
                f"kill -KILL {launcher} ends it without a record"
            )
        time.sleep(POLL_S)
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
    end = time.monotonic() + TAKEN_S
    while request.exists():
        if time.monotonic() > end:
            request.unlink(missing_ok=True)
            raise ClusterError(f"msrun drain {host}: the launcher (pid {status.launcher_pid}) does not answer")
        time.sleep(POLL_S)
    return f"{host} leaves job {status.job_id}; msrun status {log_dir} shows how it goes on"
