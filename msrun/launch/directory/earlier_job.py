"""What an earlier job has left in a log directory that the next job would not write over."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Collection
from pathlib import Path

from msrun import contract
from msrun.launch.directory.job_record import parse_plan, read_bytes


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
