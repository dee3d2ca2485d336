"""The jobs of a log directory: a folder for each, and the names of the newest one's files beside them.

    log_output/20261127-205806-3f2a9c1b/worker_0.log, plan.json, ...
    log_output/latest -> 20261127-205806-3f2a9c1b
    log_output/worker_0.log -> latest/worker_0.log

So the paths of MindSpore's documents hold, and no job touches what another one has left.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from msrun import contract
from msrun.errors import UsageError
from msrun.launch.directory.lock import read_lock
from msrun.launch.directory.log_directory import parse_plan, read_bytes
from msrun.planning.spec import LaunchSpec
from ranktable.files import replace_file

LATEST = "latest"
SCRIPT = "script.py"
"""What has come from standard input, or a pipe."""
_JOB_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
_OF_HOST = re.compile(r"node_\d+")
_PLAN = re.compile(r"plan(\.attempt_\d+)?\.json")
_LOG = re.compile(r"(?P<stem>.+?)(?:\.attempt_\d+)?\.log(?:\.\d+)?")
_OF_ALL = (
    contract.SCHEDULER_LOG,
    contract.PLAN_JSON,
    contract.EVENTS_JSONL,
    contract.FAILURE_JSON,
    contract.RANK_TABLE_JSON,
    contract.LAUNCHER_LOG,
    contract.TRACE_JSON,
)
"""What a job may write beside the logs of its ranks."""


def new_job_id() -> str:
    """Return an id that no other job has: local time, and random letters."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def of_job(spec: LaunchSpec, job_id: str) -> LaunchSpec:
    """Return what is asked, with the job's own folder as its log directory."""
    return replace(spec, log_dir=spec.log_dir / job_id)


def write_script(spec: LaunchSpec) -> LaunchSpec:
    """Write a script that could be read only once into the job's folder; return what is asked with that file
    (UsageError).
    """
    path = spec.log_dir / SCRIPT
    try:
        for folder in (spec.log_dir.parent, spec.log_dir):
            folder.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
        replace_file(path, spec.script_source.encode("utf-8", "surrogateescape"), mode=contract.FILE_MODE)
    except OSError as error:
        raise UsageError(f"--log_dir {path.parent}: cannot write {path} ({error.strerror}); give another") from None
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
        return sorted(path for path in log_dir.iterdir() if _JOB_ID.fullmatch(path.name) and path.is_dir())
    return []


def _target(link: Path) -> Path | None:
    """Return the folder that a link of ours leads to, which is one beside it."""
    with contextlib.suppress(OSError):
        name = os.readlink(link)  # noqa: PTH115 - as it is written
        if _JOB_ID.fullmatch(name) and (link.parent / name).is_dir():
            return link.parent / name
    return None


def publish(folder: Path, job_id: str, logs: Iterable[str], keep_jobs: int) -> None:
    """Give a job's files their names in the log directory, as far as links can be made, and remove old jobs but the
    newest `keep_jobs` and those that run. `folder`: of the job, or of a further host in it; nothing happens unless
    `of_job` has made it. `logs`: of its ranks, wherever they are written.
    """
    job = folder if folder.name == job_id else folder.parent
    root = job.parent
    if job.name != job_id or not _JOB_ID.fullmatch(job_id):
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
    """Give a file of the latest job's folder its name in the log directory, where that can be."""
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
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.symlink_to(target)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink()
        raise


def _remove_job(folder: Path) -> None:
    """Remove a job's files, and its folder unless a program has written something else there; may raise an OSError."""
    for host in (path for path in folder.iterdir() if _OF_HOST.fullmatch(path.name) and path.is_dir()):
        _remove_job(host)
    plans = [path.name for path in folder.iterdir() if _PLAN.fullmatch(path.name)]
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
    match = _LOG.fullmatch(name)
    return f"{match['stem']}.log" if match else ""
