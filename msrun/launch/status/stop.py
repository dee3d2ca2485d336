"""`msrun stop` and `msrun drain`: end a job as SIGTERM to its launcher does, or take a host out of it. Signalled is the
process that holds the lock at that moment, known by its id and start time: never one that was given the pid since.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from msrun import contract
from msrun.agent.logs.own_file import create_own_file
from msrun.agent.processes.process_control import Pid, signal_processes, start_time
from msrun.errors import ClusterError, UsageError, near_miss
from msrun.launch.directory.lock import parse_object, read_lock
from msrun.launch.directory.log_directory import read_bytes
from msrun.launch.status.job_status import JobState, read_status

DEFAULT_GRACE_S = 10.0
"""For a job that has not written its plan yet."""
OVERTIME_S = 20.0
"""How long past its grace a job may take to end."""
TAKEN_S = 15.0
"""How long a launcher may take to see that a host is to leave."""
POLL_S = 0.05


def stop_job(log_dir: Path, say: Callable[[str], None]) -> str:
    """End the job of a log directory and return how it ended; one that had ended is no error; `say`: told what is
    waited for (UsageError: no job's directory; ClusterError: of another host or user, or it does not end).
    """
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
    """Have a host leave the job of a log directory; return what was asked for once the launcher has taken it
    (UsageError: no job, or it has no such host, or no other; ClusterError: the launcher does not take it).
    """
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
