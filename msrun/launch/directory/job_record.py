"""What a job has written down in its log directory, read back by others: its plan and its events.

Everything may be missing, half written or damaged: the job may be writing at this moment, or have died while it was.
What cannot be understood is left out; nothing here raises for content.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from msrun import contract
from msrun.agent.logs.own_file import NOT_PLAIN, open_own_file
from msrun.cluster.membership import WorkerState
from msrun.launch.directory.lock import parse_number, parse_object

MAX_FILE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class PlannedWorker:
    """One worker of a written plan."""

    global_rank: int
    host: str
    log_name: str
    """Its log's name in the log directory, wherever that has been moved to."""


@dataclass(frozen=True)
class PlanRecord:
    """What is needed of a plan.json."""

    job_id: str
    run_dir: str
    grace_s: float | None
    hosts: tuple[str, ...]
    workers: tuple[PlannedWorker, ...]
    server_num: int = 0
    """Parameter servers."""


@dataclass
class WorkerRecord:
    """What the events tell of one worker: of its newest attempt when it was started again."""

    pid: int = 0
    state: str = WorkerState.PLANNED.value
    how: str = ""
    """How it ended, in words."""


@dataclass
class EventsRecord:
    """What the events tell of a job."""

    workers: dict[int, WorkerRecord] = field(default_factory=dict)
    begin: float | None = None
    """Wall clock, as all times here."""
    newest: float | None = None
    is_running: bool = False
    """Every worker was started."""
    stopping: str | None = None
    """Why the job is being stopped."""
    over: str | None = None
    """How the job ended."""
    restarts: int = 0
    """How often the whole job was started again; the fields above tell of its newest start."""


def read_bytes(path: Path) -> bytes | None:
    """Return a plain file's content; None when there is none.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        descriptor = open_own_file(path, os.O_RDONLY)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) or error.strerror == NOT_PLAIN:
            return None
        raise
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MAX_FILE_BYTES)


def parse_plan(data: bytes) -> PlanRecord | None:
    """Return what a plan.json says; None when it is no plan of a job."""
    plan = parse_object(data)
    job_id, run_dir = plan.get("job_id"), plan.get("run_dir")
    if not isinstance(job_id, str) or not isinstance(run_dir, str):
        return None
    hosts = [host for host in _list(plan.get("hosts")) if isinstance(host, dict)]
    workers = [worker for host in hosts for worker in _parse_workers(host)]
    return PlanRecord(
        job_id,
        run_dir,
        parse_number(plan.get("grace_s")),
        tuple(str(host.get("name", "?")) for host in hosts),
        tuple(sorted(workers, key=lambda worker: worker.global_rank)),
        sum(len(_list(host.get("servers"))) for host in hosts),
    )


def _parse_workers(host: dict[str, Any]) -> Iterable[PlannedWorker]:
    for worker in _list(host.get("workers")):
        if not isinstance(worker, dict):
            continue
        rank, log = worker.get("global_rank"), worker.get("log")
        if not _is_count(rank) or not isinstance(log, str):
            continue
        name = log.rpartition("/")[2]
        if name.endswith(contract.worker_log_name("", rank)) and "\0" not in name:
            yield PlannedWorker(rank, str(host.get("name", "?")), name)


def parse_events(data: bytes) -> EventsRecord:
    """Return what an events.jsonl tells; a line that cannot be understood, such as a half-written last one, is skipped.

    An event of an unknown kind changes nothing but the time of the newest one.
    """
    record = EventsRecord()
    for line in data.split(b"\n"):
        event = parse_object(line)
        kind = event.get("event")
        if not isinstance(kind, str):
            continue
        moment = parse_number(event.get("time"))
        if moment is not None:
            record.begin = moment if record.begin is None else record.begin
            record.newest = moment
        _fold(record, kind, event)
    return record


def _fold(record: EventsRecord, kind: str, event: dict[str, Any]) -> None:
    rank = event.get("global_rank")
    if kind == "started" and _is_count(rank):
        pid = event.get("pid")
        record.workers[rank] = WorkerRecord(pid if _is_count(pid) else 0, WorkerState.RUNNING.value)
    elif kind == "exited" and _is_count(rank):
        worker = record.workers.setdefault(rank, WorkerRecord())
        worker.state, worker.how = str(event.get("state", "ended")), str(event.get("how", ""))
    elif kind == "running":
        record.is_running = True
    elif kind in ("stopping", "over"):
        setattr(record, kind, str(event.get("reason", "")))
    elif kind == "restarting":
        record.workers.clear()
        record.is_running, record.stopping, record.over = False, None, None
        record.restarts += 1


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
