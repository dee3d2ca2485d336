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

    Only plain files go, and only those that the plan lists as the log of a worker (`worker_3.log`) or of a parameter
    server (`server_1.log`), those of their earlier attempts (`worker_3.attempt_0.log`), what was rotated of a worker's
    (`worker_3.log.1`), the same of the scheduler, `msrun.log`, and the trace with its parts. Without a readable plan
    nothing goes. The lock of the directory has to be held.

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
    names = {worker.log_name for worker in plan.workers} | {contract.SCHEDULER_LOG}
    names |= {f"{contract.server_name(index)}.log" for index in range(plan.server_num)}
    traces = {contract.TRACE_JSON, *(contract.trace_file_name(worker.global_rank) for worker in plan.workers)}
    for path in log_dir.iterdir():
        is_earlier = path.name in (contract.LAUNCHER_LOG, *traces) or log_of(path.name) in names
        if is_earlier and path.name not in keep:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()


_KEPT = re.compile(r"(?P<stem>.+?)(?:\.attempt_\d+)?\.log(?:\.\d+)?")


def log_of(name: str) -> str:
    """Return whose log a file is, earlier attempts and rotated ones taken back: `worker_3.log` for
    `worker_3.attempt_0.log.2`; an empty string for what is no log.
    """
    match = _KEPT.fullmatch(name)
    return f"{match['stem']}.log" if match else ""
