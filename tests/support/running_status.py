"""The status of a job that runs on two hosts, for tests of what is shown of it."""

from __future__ import annotations

from pathlib import Path

from msrun.launch.status.job_status import JobState, JobStatus

RUNNING = JobStatus(
    job_id="f00d",
    state=JobState.RUNNING,
    reason="",
    exit_code=None,
    hosts=("a", "b"),
    launcher_host="a",
    launcher_pid=7,
    run_time_s=75.0,
    restarts=0,
    log_dir=Path("/logs"),
    grace_s=10.0,
    rows=(),
    notes=(),
    now=1000.0,
)
