"""A process of msrun's own that somebody has stopped: the job ends within --heartbeat_time_out and names it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner


@pytest.mark.parametrize("role", one_fast("fork server", "scheduler", "log writer"))
def test_stopped_process_of_its_own_ends_the_job_and_is_named(
    msrun: JobRunner, workers: Path, tmp_path: Path, role: str
) -> None:
    options = ("--worker_num=2", "--heartbeat_time_out=2", "--log_max_bytes=1M", workers / "wait.py")
    job = msrun.start(*options, cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    sign = {"fork server": "fork_server import main"}.get(role, f"msrun: {role}").encode()
    (pid,) = [pid for pid in msrun.processes() if sign in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(pid, signal.SIGSTOP)
    ended = job.finish()
    assert ended.code == 3
    assert f"the {role} (pid {pid}) has been stopped by a signal for " in ended.errors[0]
    msrun.prove_nothing_left()
