"""The job's log directory: made, checked and filled before anything starts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.agent.logs.own_file import create_own_file, open_own_file
from msrun.cluster.membership import Membership
from msrun.errors import UsageError
from msrun.launch.directory.job_record import parse_plan, read_bytes
from msrun.launch.printable import printable
from msrun.planning.plan import LaunchPlan
from ranktable.files import replace_file


def remove_earlier_job(log_dir: Path, keep: Collection[str]) -> None:
    """Remove the logs of the job whose `plan.json` is in the directory, but for names that the next job has too.

    Only plain files go, and only those that the plan, or that of an attempt on other hosts (`plan.attempt_0.json`),
    lists as the log of a worker (`worker_3.log`) or of a parameter server (`server_1.log`), those of their earlier
    attempts (`worker_3.attempt_0.log`), what was rotated of a worker's (`worker_3.log.1`), the same of the scheduler,
    `msrun.log`, the trace with its parts, and plans of attempts. Without a readable plan nothing goes. The lock of the
    directory has to be held.

    Raises:
        OSError: a file cannot be removed.
    """
    try:
        data = read_bytes(log_dir / contract.PLAN_JSON)
    except OSError:
        return
    plan = parse_plan(data) if data is not None else None
    if plan is None:
        return
    of_attempts = {name: parse_plan(read_bytes(log_dir / name) or b"") for name in _plans_of_attempts(log_dir)}
    names = {contract.SCHEDULER_LOG}
    others = {contract.LAUNCHER_LOG, contract.TRACE_JSON, *of_attempts}
    for one in (plan, *(found for found in of_attempts.values() if found is not None)):
        names |= {worker.log_name for worker in one.workers}
        names |= {f"{contract.server_name(index)}.log" for index in range(one.server_num)}
        traces = {contract.trace_file_name(worker.global_rank) for worker in one.workers}
        others |= traces
        names |= {f"{trace}.log" for trace in traces}  # those of earlier attempts are named as logs are
    for path in log_dir.iterdir():
        is_earlier = path.name in others or log_of(path.name) in names
        if is_earlier and path.name not in keep:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()


def _plans_of_attempts(log_dir: Path) -> list[str]:
    """Return the names of the plans of a job's attempts on hosts of which it has lost some since."""
    found = (_ATTEMPT.fullmatch(path.name) for path in log_dir.iterdir())
    return [match[0] for match in found if match and match[0] == contract.attempt_plan_name(int(match[1]))]


_ATTEMPT = re.compile(r"plan\.attempt_(\d+)\.json")
_KEPT = re.compile(r"(?P<stem>.+?)(?:\.attempt_\d+)?\.log(?:\.\d+)?")


def log_of(name: str) -> str:
    """Return whose log a file is, earlier attempts and rotated ones taken back: `worker_3.log` for
    `worker_3.attempt_0.log.2`; an empty string for what is no log.
    """
    match = _KEPT.fullmatch(name)
    return f"{match['stem']}.log" if match else ""


MAX_CHARS = 1 << 16
"""Of a traceback, which another host may have sent."""


def record_fault(folder: Path, what: str, trace: str) -> None:
    """Append a fault with its traceback; to stderr where there is no `scheduler.log` to write.

    Args:
        folder: the job's log directory.
        what: one line.
    """
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
    """Create the directory (0700) and this job's empty log files (0600), and write `plan.json`.

    The directory then tells of this job alone. Logs of an earlier job are emptied; those that only the earlier one had
    (ranks of a bigger job, earlier attempts, rotated ones, `msrun.log`) and its failure file are removed. Nothing else
    in the directory is touched. The caller holds its lock.

    Raises:
        UsageError: it cannot be created or written, or a file of the job is not a plain file.
    """
    folder = Path(plan.log_dir)
    try:
        folder.mkdir(mode=contract.DIRECTORY_MODE, parents=True, exist_ok=True)
        logs = [worker.log_path for worker in plan.workers]
        logs += [server.log_path for host in plan.hosts for server in host.servers]
        remove_earlier_job(folder, {contract.SCHEDULER_LOG, *(Path(log).name for log in logs)})
        (folder / contract.FAILURE_JSON).unlink(missing_ok=True)
        for path in (folder / contract.SCHEDULER_LOG, folder / contract.EVENTS_JSONL):
            os.close(create_own_file(path))
        for log in logs:
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


class EventLog:
    """Writes `events.jsonl`: one JSON object per moment of the job, with wall-clock and job time in seconds."""

    tick_s: float | None = None

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

    def tick(self, membership: Membership) -> None:
        """Nothing regular to write."""

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()
