"""How processes are known as those of a job, whoever their parents are: by MSRUN_JOB_ID in the environment that /proc
shows, and by a limit that the kernel hands on.

A daemon may be started with an empty environment, in a session of its own; a lowered hard limit stays with it, and only
a privileged process can raise it. RLIMIT_LOCKS bounds nothing since Linux 2.4.25, so it can hold a number of ours.
Source: getrlimit(2), proc(5).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import resource
import shutil
import signal
import time
from pathlib import Path

from msrun import contract
from msrun.agent.processes.process_control import POLL_S, Pid, read_stat, signal_processes
from msrun.agent.processes.process_spec import LOG_WRITER_TITLE

NO_JOB = "0" * 16  # stands in the environment of a process that has no job yet, in the place of the id: as long as one
RLIMIT_LOCKS = 10  # Not among the names of `resource`. Source: asm-generic/resource.h.
_SHOWN_LIMIT = re.compile(rb"^Max file locks +\S+ +(\d+) ", re.MULTILINE)
"""The hard limit, where there is one, in what everybody may read; prlimit() wants the same user."""
_DIGEST_BITS = 48


def mark_job(job_id: str) -> None:
    """Make this process, and all that it will start, processes of a job.

    The environment is written where /proc shows it: in the memory that held it when the program was started.
    """
    stat = read_stat("self")
    assert stat is not None, "this process has gone"
    start, end = stat.environment
    mark = f"{contract.MSRUN_JOB_ID}=".encode()
    offset = (b"\0" + ctypes.string_at(start, end - start)).find(b"\0" + mark + NO_JOB.encode() + b"\0")
    if offset >= 0 and len(job_id) == len(NO_JOB):
        ctypes.memmove(start + offset + len(mark), job_id.encode(), len(job_id))
    _, hard = resource.getrlimit(RLIMIT_LOCKS)
    ceiling = 1 << 62 if hard == resource.RLIM_INFINITY else hard
    limit = ((ceiling >> _DIGEST_BITS) - 1 << _DIGEST_BITS) + _digest(job_id)  # below that of a job around this one
    with contextlib.suppress(OSError, ValueError):  # no such limit here, or a user's own that leaves no room
        resource.setrlimit(RLIMIT_LOCKS, (limit, limit))


def marked_processes(job_id: str) -> list[Pid]:
    """Return every living process of a job but this one."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208 - no Path per process
    found = []
    for pid in pids:
        stat = read_stat(pid) if pid != os.getpid() and _is_marked(pid, job_id) else None
        if stat and stat.state != "Z":
            found.append(Pid(pid, stat.started_at))
    return found


def _is_marked(pid: int, job_id: str) -> bool:
    """Return whether a process is one of the job's; False where it is not to be looked at."""
    with contextlib.suppress(OSError):
        limit = _SHOWN_LIMIT.search(Path("/proc", str(pid), "limits").read_bytes())
        if limit and int(limit[1]) % (1 << _DIGEST_BITS) == _digest(job_id):
            return True
        shown = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        return f"{contract.MSRUN_JOB_ID}={job_id}".encode() in shown
    return False


def _digest(job_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=_DIGEST_BITS // 8).digest())


SERVER_END_S = 5.0  # how long a fork server that still runs is trusted to clean up: it ends this process too
LOOKS = 300
"""How often what is left is killed; counted, not timed: on a busy machine the looks are slow, and so is what they wait
for. At least 3 s."""
LAST_WORDS_LOOKS = 200
"""For how many of them the log writer may write what workers wrote last; it ends by itself once nobody can write."""


def _is_log_writer(pid: int) -> bool:
    """Return whether one of the job's processes is its log writer."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes().startswith(LOG_WRITER_TITLE.encode())
    return False


def sweep_job(server_pid: int, job_id: str, run_dir: str) -> None:
    """Wait for the fork server's end, then kill what is left of the job and remove its temporary folder."""
    end = time.monotonic() + SERVER_END_S
    while os.getppid() == server_pid:
        if time.monotonic() > end:
            return
        time.sleep(POLL_S)
    end_job(job_id)
    shutil.rmtree(run_dir, ignore_errors=True)


def end_job(job_id: str) -> None:
    """Kill every process of a job but this one; the log writer may first write what workers wrote last."""
    for look in range(LOOKS):
        left = marked_processes(job_id)
        if not left:
            return
        may_write = look < LAST_WORDS_LOOKS
        signal_processes([pid for pid in left if not (may_write and _is_log_writer(pid))], signal.SIGKILL)
        time.sleep(POLL_S)
