"""What the scheduler does when agent and fork server were killed in the same instant.

Each of the two cleans up after the other, and the kernel ends the workers with the fork server. Only what workers had
started themselves could live on then. The scheduler is the third that knows: it finds those processes by the job's
marks, never by name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from msrun.agent.processes.job_mark import marked_processes
from msrun.agent.processes.process_control import POLL_S, signal_processes
from msrun.agent.processes.process_spec import LOG_WRITER_TITLE

SERVER_END_S = 5.0
"""How long a fork server that still runs is trusted to clean up: it ends this process too."""
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
