"""What the scheduler does when agent and fork server were killed in the same instant.

Each of the two cleans up after the other, and the kernel ends the workers with the fork server. Only what workers had
started themselves could live on then. The scheduler is the third that knows: it finds those processes by the job's
random id in their environment, and in the job's control group, never by name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from msrun import contract
from msrun.agent.host.job_group import group_members, remove_group
from msrun.agent.processes.process_control import POLL_S, Pid, signal_processes, start_time
from msrun.agent.processes.process_spec import LOG_WRITER_TITLE

SERVER_END_S = 5.0
"""How long a fork server that still runs is trusted to clean up: it ends this process too."""
LOOKS = 300
"""How often what is left is killed; counted, not timed: on a busy machine the looks are slow, and so is what they wait
for. At least 3 s."""
LAST_WORDS_LOOKS = 200
"""For how many of them the log writer may write what workers wrote last; it ends by itself once nobody can write."""


def marked_processes(job_id: str, group: str = "") -> list[Pid]:
    """Return every living process of a job but this one, by MSRUN_JOB_ID in its environment or by its group."""
    mark = f"{contract.MSRUN_JOB_ID}={job_id}".encode()
    found = [Pid(pid, started_at) for pid in group_members(group) if (started_at := start_time(pid))]
    found = [pid for pid in found if pid != os.getpid()]
    for entry in os.listdir("/proc"):  # noqa: PTH208 - one call, no Path object per process
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                started_at = start_time(int(entry))
                if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(Pid(int(entry), started_at))
    return found


def _is_log_writer(pid: int) -> bool:
    """Return whether one of the job's processes is its log writer."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes().startswith(LOG_WRITER_TITLE.encode())
    return False


def sweep_job(server_pid: int, job_id: str, run_dir: str, group: str) -> None:
    """Wait for the fork server's end, then kill what is left of the job and remove its temporary folder."""
    end = time.monotonic() + SERVER_END_S
    while os.getppid() == server_pid:
        if time.monotonic() > end:
            return
        time.sleep(POLL_S)
    end_job(job_id, group)
    shutil.rmtree(run_dir, ignore_errors=True)


def end_job(job_id: str, group: str) -> None:
    """Kill every process of a job but this one, and remove its group; the log writer may first write what workers wrote
    last.

    Args:
        group: folder of the job's control group; empty where it has none.
    """
    for look in range(LOOKS):
        left = marked_processes(job_id, group)
        if not left:
            break
        may_write = look < LAST_WORDS_LOOKS
        signal_processes([pid for pid in left if not (may_write and _is_log_writer(pid))], signal.SIGKILL)
        time.sleep(POLL_S)
    remove_group(group)
