"""A job's log directory: made and filled before anything starts, written while it runs, read back by others. What is
read may be missing, half written or damaged; what cannot be understood is left out, and no content is an error.

Each job has a folder there, and the newest one's files have names beside it:

    log_output/20261127-205806-3f2a9c1b/worker_0.log, plan.json, ...
    log_output/latest -> 20261127-205806-3f2a9c1b
    log_output/worker_0.log -> latest/worker_0.log

So the paths of MindSpore's documents hold, and no job touches what another one has left.

The launcher holds a POSIX record lock (fcntl(2), F_SETLK) on `job.lock` for as long as its job uses the directory: the
kernel takes it back when the launcher ends, however it ends, and F_GETLK names the holder. A fork does not inherit it,
so the process that lives on has to take it; closing *any* descriptor of the file gives it up, so who holds it must not
open the file again. The file's first line is a `LockRecord` as JSON, which stays when the lock is given up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard

from msrun import contract
from msrun.agent.log_file import BoundedLog, LogLimit
from msrun.agent.observer import Observer, append_fault
from msrun.agent.own_file import NOT_PLAIN, create_own_file, open_own_file
from msrun.cluster.membership import Membership, WorkerState
from msrun.errors import UsageError, refused_as
from msrun.launch.output import printable
from msrun.planning.plan import LaunchPlan
from msrun.planning.record import Record
from msrun.planning.spec import LaunchSpec
from ranktable.files import replace_file

MAX_RECORD_BYTES = 64 * 1024
RECORD_WAIT_S = 0.2  # how long a reader waits for the record of a job that has just taken the lock
POLL_S = 0.005
MAX_TIME = 1e12  # no moment or span in seconds is beyond this; more is damage

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid
_ASKED = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class LockRecord(Record):
    """Who took the lock last."""

    job_id: str
    pid: int  # of its launcher, as the launcher's own host and container count it
    host: str
    started_at: float  # wall clock, seconds since 1970
    error: str = ""  # why the job ended before its first event; left out otherwise


class LockState(Record):
    """What can be seen of a lock at one moment."""

    record: LockRecord | None  # None when the file is missing or damaged
    holder_pid: int | None  # None: nobody; 0 or less: out of sight, on another host, in a container

    @property
    def is_held(self) -> bool:
        return self.holder_pid is not None

    def describe(self) -> str:
        """Return the job in words: "job 3f2a (pid 17 on host a)"."""
        if self.record is None:
            return f"a job that is just starting (pid {self.holder_pid})"
        return f"job {self.record.job_id} (pid {self.record.pid} on host {self.record.host})"


class JobLock:
    """The lock as its job holds it: `take` it when the job is known to be possible, leave the context to give it up."""

    def __init__(self, log_dir: Path, job_id: str) -> None:
        self._log_dir = log_dir
        self._given = log_dir.parent if log_dir.name == job_id else log_dir  # what the user has named
        self._record = LockRecord(job_id, os.getpid(), socket.gethostname(), round(time.time(), 3))
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._descriptor is None:
            return
        if error is not None:
            with contextlib.suppress(OSError):
                self._write(replace(self._record, error=str(error) or type(error).__name__), self._descriptor)
        os.close(self._descriptor)

    def take(self) -> None:
        """Create the directory (0700) and lock it (UsageError: another job uses it, or it cannot be written)."""
        path, verb = self._log_dir / contract.LOCK_FILE, "write"
        with contextlib.ExitStack() as stack:
            try:
                for folder in (self._given, self._log_dir):
                    folder.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
                descriptor, verb = open_own_file(path, os.O_RDWR | os.O_CREAT), "lock"
                stack.callback(os.close, descriptor)
                self._lock(descriptor)
                self._write(self._record, descriptor)
            except OSError as error:
                raise UsageError(
                    f"--log_dir {self._given}: cannot {verb} {error.filename or path} ({error.strerror}); give a "
                    "directory that you may write, on a file system with locks"
                ) from None
            stack.pop_all()
        self._descriptor = descriptor

    def _lock(self, descriptor: int) -> None:
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            state = read_lock(self._log_dir)
            if state.is_held:
                raise UsageError(
                    f"--log_dir {self._log_dir}: in use by {state.describe()}; give another --log_dir, "
                    f"or end that job with msrun --stop {shlex.quote(str(self._log_dir))}"
                )

    def _write(self, record: LockRecord, descriptor: int) -> None:
        fields = {name: value for name, value in asdict(record).items() if value != ""}
        data = json.dumps(fields).encode() + b"\n"
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))


def read_lock(log_dir: Path) -> LockState:
    """Return who holds the lock (OSError); never for a process that holds it itself, which would lose it."""
    path = log_dir / contract.LOCK_FILE
    try:
        descriptor = open_own_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return LockState(None, None)
    try:
        end = time.monotonic() + RECORD_WAIT_S
        while True:
            kind, _, _, _, holder = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, _ASKED))
            pid = None if kind == fcntl.F_UNLCK else int(holder)
            record = parse_record(os.pread(descriptor, MAX_RECORD_BYTES, 0))
            # A holder in another container counts its pid otherwise, so a difference is no proof of an old record.
            is_settled = pid is None or pid <= 0 or (record is not None and record.pid == pid)
            if is_settled or time.monotonic() > end:
                return LockState(record, pid)
            time.sleep(POLL_S)
    finally:
        os.close(descriptor)


def parse_record(data: bytes) -> LockRecord | None:
    """Return the record in the first line of a lock file, or None when it is no record."""
    fields = parse_object(data.split(b"\n", 1)[0])
    job_id, host, error = (fields.get(name, "") for name in ("job_id", "host", "error"))
    pid, started_at = (parse_number(fields.get(name)) for name in ("pid", "started_at"))
    are_texts = isinstance(job_id, str) and isinstance(host, str) and isinstance(error, str)
    if not are_texts or not job_id or pid is None or started_at is None:
        return None
    return LockRecord(job_id, int(pid), host, started_at, error)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one when the bytes are none: damaged, half written, another value."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def parse_number(value: object) -> float | None:
    """Return a JSON number as a float; None when it is none, or not one that this program ever writes."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_TIME:
        return None
    return float(value)


MAX_CHARS = 1 << 16  # of a traceback, which another host may have sent


def record_fault(folder: Path, what: str, trace: str) -> None:
    """Append `what`, a line, and its traceback to `scheduler.log` of a log directory, or to stderr if it cannot be."""
    what, trace = printable(what), printable(trace[-MAX_CHARS:])
    if not append_fault(folder / contract.SCHEDULER_LOG, what, trace):
        sys.stderr.write(f"{what}\n{trace.rstrip()}\n")


def prepare_log_directory(plan: LaunchPlan) -> None:
    """Create the directory (0700) and empty logs (0600), write `plan.json`; the lock is held (UsageError)."""
    folder = Path(plan.log_dir)
    remedy = "give a directory that you may write"
    with refused_as(f"--log_dir {plan.log_dir}: cannot write", remedy, at=folder):
        folder.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
        for path in (folder / contract.SCHEDULER_LOG, folder / contract.EVENTS_JSONL):
            os.close(create_own_file(path))
        for log in plan.log_paths:
            os.close(create_own_file(Path(log)))
        write_private(folder / contract.PLAN_JSON, json.dumps(plan.to_json(), indent=2) + "\n")


def describe_removed(folder: Path, before: os.stat_result) -> str:
    """Return that the log directory is another one than before, or is gone; empty when it is the same."""
    with contextlib.suppress(OSError):
        if os.path.samestat(folder.stat(), before):
            return ""
    return f"the log directory {folder} was removed while the job ran: what was written before and since is lost"


def write_private(path: Path, text: str) -> None:
    replace_file(path, text.encode("utf-8", "surrogateescape"), mode=contract.FILE_MODE)


class EventLog(Observer):
    """Writes `events.jsonl`: one JSON object per moment of the job, with wall-clock and job time in seconds."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(create_own_file(path), "w", encoding="utf-8", buffering=1)
        self.folder = path.parent.stat()  # as it was when this was made, for `describe_removed`
        self._begin = time.monotonic()

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        moment = {"time": round(time.time(), 6), "job_s": round(time.monotonic() - self._begin, 6), "event": kind}
        with contextlib.suppress(OSError):  # disk full: no reason to end the job
            self._file.write(json.dumps({**moment, **fields}) + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class BoundedLogs(Observer):
    """Those that the workers of one host write."""

    def __init__(self, paths: Iterable[str], limit: LogLimit | None, say: Callable[[str], None]) -> None:
        """`limit`: None = they stay whole."""
        self.tick_s = 0.25 if limit else None
        self._logs = [BoundedLog(path, limit, self._on_refused) for path in paths] if limit else []
        self._say = say

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:  # noqa: ARG002
        if kind == "restarting":  # they are about to be renamed, and who shows them has read them
            self.end()

    def tick(self, membership: Membership | None = None) -> None:  # noqa: ARG002
        for log in self._logs:
            log.look()

    def _on_refused(self, reason: str) -> None:
        if self._logs:
            self._logs = []
            self._say(f"--log_max_bytes: logs stay whole, for their file system cannot free part of a file ({reason})")

    def end(self) -> None:
        """Nobody writes or follows these files any more."""
        self.tick()
        for log in self._logs:
            log.end()


MAX_FILE_BYTES = 256 * 1024 * 1024


class PlannedWorker(Record):
    """One worker of a written plan."""

    global_rank: int
    host: str
    log_name: str  # its log's name in the log directory, wherever that has been moved to


class PlanRecord(Record):
    """What is needed of a plan.json."""

    job_id: str
    run_dir: str
    grace_s: float | None
    hosts: tuple[str, ...]
    workers: tuple[PlannedWorker, ...]
    server_num: int = 0  # of parameter servers


class WorkerRecord(Record, frozen=False):
    """What the events tell of one worker: of its newest attempt when it was started again."""

    pid: int = 0
    state: str = WorkerState.PLANNED.value
    how: str = ""  # how it ended, in words


class EventsRecord(Record, frozen=False):
    """What the events tell of a job."""

    workers: dict[int, WorkerRecord] = field(default_factory=dict)
    begin: float | None = None  # wall clock, as all times here
    newest: float | None = None
    is_running: bool = False  # every worker was started
    stopping: str | None = None  # why the job is being stopped
    over: str | None = None  # how the job ended
    restarts: int = 0  # how often the whole job was started again; the fields above tell of its newest start


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


# -- the jobs of a log directory --------------------------------------------------------------------------------------

LATEST = "latest"
SCRIPT = "script.py"  # what has come from standard input, or a pipe
_JOB_ID = r"\d{8}-\d{6}-[0-9a-f]{8}"
_OF_HOST = r"node_\d+"
_PLAN = r"plan(\.attempt_\d+)?\.json"
_LOG = r"(?P<stem>.+?)(?:\.attempt_\d+)?\.log(?:\.\d+)?"
_OF_ALL = (
    contract.SCHEDULER_LOG,
    contract.PLAN_JSON,
    contract.EVENTS_JSONL,
    contract.FAILURE_JSON,
    contract.RANK_TABLE_JSON,
    contract.LAUNCHER_LOG,
    contract.TRACE_JSON,
)  # what a job may write beside the logs of its ranks


def new_job_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"


def of_job(spec: LaunchSpec, job_id: str) -> LaunchSpec:
    return replace(spec, log_dir=spec.log_dir / job_id)


def write_script(spec: LaunchSpec) -> LaunchSpec:
    """Write a script that could be read only once into the job's folder; return what is asked with it (UsageError)."""
    path = spec.log_dir / SCRIPT
    with refused_as(f"--log_dir {path.parent}: cannot write {path}", "give another"):
        for folder in (spec.log_dir.parent, spec.log_dir):
            folder.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
        replace_file(path, spec.script_source.encode("utf-8", "surrogateescape"), mode=contract.FILE_MODE)
    return replace(spec, program=replace(spec.program, target=str(path)), script_source="")


def find_job(log_dir: Path) -> Path:
    """Return the folder of the newest job of a log directory; a job's own folder is returned as it is."""
    log_dir = log_dir.absolute()
    return _target(log_dir) or _target(log_dir / LATEST) or max(list_jobs(log_dir), default=log_dir)


def require_job(log_dir: Path, option: str) -> Path:
    """Return the same, for the value of an option or a command; UsageError: there is no such directory."""
    log_dir = find_job(log_dir)
    if not log_dir.is_dir():
        what = "is a file" if log_dir.exists() else "no such directory"
        raise UsageError(f"{option} {log_dir}: {what}; give the --log_dir of a job")
    return log_dir


def list_jobs(log_dir: Path) -> list[Path]:
    """Return the folders of jobs in a log directory, the oldest first; none when it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(path for path in log_dir.iterdir() if re.fullmatch(_JOB_ID, path.name) and path.is_dir())
    return []


def _target(link: Path) -> Path | None:
    with contextlib.suppress(OSError):
        name = os.readlink(link)  # noqa: PTH115 - as it is written
        if re.fullmatch(_JOB_ID, name) and (link.parent / name).is_dir():
            return link.parent / name
    return None


def publish(folder: Path, job_id: str, logs: Iterable[str], keep_jobs: int) -> None:
    """Give a job's files their names in the log directory, as far as links can be made, and remove old jobs but the
    newest `keep_jobs` and those that run. `folder`: of the job, or of a further host in it, as `of_job` has made it.
    `logs`: of its ranks, wherever they are written."""
    job = folder if folder.name == job_id else folder.parent
    root = job.parent
    if job.name != job_id or not re.fullmatch(_JOB_ID, job_id):
        return
    names = [Path(log).name for log in logs] if folder == job else [folder.name]
    with contextlib.suppress(OSError):
        _link(root / LATEST, job_id)
        for path in root.iterdir():
            if path.is_symlink() and str(path.readlink()).startswith(f"{LATEST}/") and not path.exists():
                path.unlink(missing_ok=True)  # of an earlier job
    for path in [*(job / name for name in names), *(job / name for name in _OF_ALL if (job / name).exists())]:
        publish_file(path)
    jobs = [found for found in list_jobs(root) if found != job]
    for old in jobs[: max(0, len(jobs) - keep_jobs + 1)]:
        with contextlib.suppress(OSError):
            lock = read_lock(old)
            if lock.record is not None and not lock.is_held:  # without a record it is just starting
                _remove_job(old)


def publish_file(path: Path) -> None:
    root = path.parent.parent
    with contextlib.suppress(OSError):
        if _target(root / LATEST) == path.parent:
            _link(root / path.name, f"{LATEST}/{path.name}")


def _link(path: Path, target: str) -> None:
    """Make a link in the place of a link, or of a file that an earlier msrun, or MindSpore's, has left."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) and str(path.readlink()) == target:
            return
        if not (stat.S_ISLNK(status.st_mode) or stat.S_ISREG(status.st_mode)):
            return
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    temporary.symlink_to(target)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink()


def _remove_job(folder: Path) -> None:
    for host in (path for path in folder.iterdir() if re.fullmatch(_OF_HOST, path.name) and path.is_dir()):
        _remove_job(host)
    plans = [path.name for path in folder.iterdir() if re.fullmatch(_PLAN, path.name)]
    known = {*_OF_ALL, SCRIPT, contract.LOCK_FILE, *plans}
    logs = {contract.SCHEDULER_LOG}
    for plan in filter(None, (parse_plan(read_bytes(folder / name) or b"") for name in plans)):
        traces = {contract.trace_file_name(worker.global_rank) for worker in plan.workers}
        known |= traces | {contract.flight_recorder_name(worker.global_rank) for worker in plan.workers}
        logs |= {contract.error_log_name(worker.log_name) for worker in plan.workers}
        logs |= {worker.log_name for worker in plan.workers} | {f"{trace}.log" for trace in traces}
        logs |= {f"{contract.server_name(index)}.log" for index in range(plan.server_num)}
    for path in folder.iterdir():
        is_plain = stat.S_ISREG(path.lstat().st_mode)
        if is_plain and (path.name in known or log_of(path.name) in logs):
            path.unlink(missing_ok=True)
    for left in (folder / contract.DRAIN, folder):
        with contextlib.suppress(OSError):
            left.rmdir()


def log_of(name: str) -> str:
    """Return whose log a file is: `worker_3.log` for `worker_3.attempt_0.log.2`; empty for what is no log."""
    match = re.fullmatch(_LOG, name)
    return f"{match['stem']}.log" if match else ""
