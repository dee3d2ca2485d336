"""A job's log directory: made and filled before anything starts, written while it runs, read back by others. What is
read may be missing, half written or damaged; what cannot be understood is left out, and no content is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from msrun import contract
from msrun.agent.logs.own_file import NOT_PLAIN, create_own_file, open_own_file
from msrun.agent.observer import Observer
from msrun.cluster.membership import WorkerState
from msrun.errors import UsageError
from msrun.launch.directory.lock import parse_number, parse_object
from msrun.launch.output import printable
from msrun.planning.plan import LaunchPlan
from ranktable.files import replace_file

MAX_CHARS = 1 << 16
"""Of a traceback, which another host may have sent."""


def record_fault(folder: Path, what: str, trace: str) -> None:
    """Append `what`, a line, and its traceback to `scheduler.log` of a log directory, or to stderr if it cannot be."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    text = printable(f"{stamp} {what}\n{trace[-MAX_CHARS:].rstrip()}\n")
    try:
        descriptor = open_own_file(folder / contract.SCHEDULER_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError:
        sys.stderr.write(text)
        return
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def prepare_log_directory(plan: LaunchPlan) -> None:
    """Create the directory (0700) and this job's empty logs (0600), and write `plan.json`; the caller holds its lock.

    UsageError: it cannot be created or written, or a file of the job is not a plain file.
    """
    folder = Path(plan.log_dir)
    try:
        folder.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
        for path in (folder / contract.SCHEDULER_LOG, folder / contract.EVENTS_JSONL):
            os.close(create_own_file(path))
        for log in plan.log_paths:
            os.close(create_own_file(Path(log)))
        write_private(folder / contract.PLAN_JSON, json.dumps(plan.to_json(), indent=2) + "\n")
    except OSError as error:
        raise UsageError(
            f"--log_dir {plan.log_dir}: cannot write {error.filename or folder} ({error.strerror}); "
            "give a directory that you may write"
        ) from None


def describe_removed(folder: Path, before: os.stat_result) -> str:
    """Return that the log directory is another one than before, or is gone; empty when it is the same."""
    with contextlib.suppress(OSError):
        if os.path.samestat(folder.stat(), before):
            return ""
    return f"the log directory {folder} was removed while the job ran: what was written before and since is lost"


def write_private(path: Path, text: str) -> None:
    """Write a whole file of the log directory, mode 0600, in the place of whatever is there."""
    replace_file(path, text.encode("utf-8", "surrogateescape"), mode=contract.FILE_MODE)


class EventLog(Observer):
    """Writes `events.jsonl`: one JSON object per moment of the job, with wall-clock and job time in seconds."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(create_own_file(path), "w", encoding="utf-8", buffering=1)
        self.folder = path.parent.stat()
        """The folder that it is in, as it was when this was made: for `describe_removed`."""
        self._begin = time.monotonic()

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write one event."""
        moment = {"time": round(time.time(), 6), "job_s": round(time.monotonic() - self._begin, 6), "event": kind}
        with contextlib.suppress(OSError):  # disk full: no reason to end the job
            self._file.write(json.dumps({**moment, **fields}) + "\n")

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


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
    """Of parameter servers."""


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
    """Return a plain file's content; None when there is none. OSError: it is there and cannot be read."""
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
    hosts, workers = _objects(plan.get("hosts")), []
    for host, worker in ((one, worker) for one in hosts for worker in _objects(one.get("workers"))):
        rank, name = worker.get("global_rank"), str(worker.get("log")).rpartition("/")[2]
        if _is_count(rank) and name.endswith(contract.worker_log_name("", rank)) and "\0" not in name:
            workers.append(PlannedWorker(rank, str(host.get("name", "?")), name))
    return PlanRecord(
        job_id,
        run_dir,
        parse_number(plan.get("grace_s")),
        tuple(str(host.get("name", "?")) for host in hosts),
        tuple(sorted(workers, key=lambda worker: worker.global_rank)),
        sum(len(_objects(host.get("servers"))) for host in hosts),
    )


def read_events(data: bytes) -> Iterator[tuple[str, float | None, dict[str, Any]]]:
    """Yield kind, moment (wall clock) and fields of each event of an events.jsonl; other lines are skipped."""
    for line in data.split(b"\n"):
        event = parse_object(line)
        if isinstance(kind := event.get("event"), str):
            yield kind, parse_number(event.get("time")), event


def parse_events(data: bytes) -> EventsRecord:
    """Return what an events.jsonl tells; an event of an unknown kind changes but the time of the newest one."""
    record = EventsRecord()
    for kind, moment, event in read_events(data):
        if moment is not None:
            record.begin = moment if record.begin is None else record.begin
            record.newest = moment
        rank, pid = event.get("global_rank"), event.get("pid")
        if kind == "started" and _is_count(rank):
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
    return record


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _objects(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
