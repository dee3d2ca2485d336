"""A job's status as JSON; docs/reference/status.md describes the keys, which stay what they are."""

from __future__ import annotations

import json
import math
from typing import Any

from msrun.cluster.membership import WorkerState
from msrun.launch.status.job_status import NOT_STARTED, JobState, JobStatus, WorkerRow

JOB_STATES = {
    JobState.STARTING: "starting",
    JobState.RUNNING: "running",
    JobState.STOPPING: "stopping",
    JobState.ENDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.INTERRUPTED: "interrupted",
    JobState.DIED: "died",
}
_WORKER_STATES = {WorkerState.STOPPED.value: "stopped", NOT_STARTED: "not_started"}


def render_json(status: JobStatus) -> str:
    """Return the status as one JSON object on one line, in ASCII."""
    return json.dumps(_job(status), allow_nan=False)


def _job(status: JobStatus) -> dict[str, Any]:
    return {
        "job_id": status.job_id,
        "state": JOB_STATES[status.state],
        "reason": status.reason,
        "exit_code": status.exit_code if status.state is not JobState.ENDED else 0,
        "time": round(status.now, 3),
        "run_time_s": _rounded(status.run_time_s),
        "restarts": status.restarts,
        "log_dir": str(status.log_dir),
        "hosts": list(dict.fromkeys(status.hosts)),
        "launcher": {"host": status.launcher_host, "pid": status.launcher_pid},
        "notes": list(status.notes),
        "workers": [_worker(status, row) for row in status.rows],
    }


def _worker(status: JobStatus, row: WorkerRow) -> dict[str, Any]:
    told, usage = row.progress, row.usage
    state, _, how = row.state.partition(": ")
    return {
        "global_rank": row.global_rank,
        "host": row.host,
        "pid": row.pid or None,
        "state": _WORKER_STATES.get(state, state),
        "how": how,
        "step": row.step,
        "total_steps": told.total or None,
        "steps_per_s": _rounded(row.steps_per_s),
        "loss": row.loss if row.loss is not None and math.isfinite(row.loss) else None,
        "doing": told.describe(status.clock),
        "waits_s": _rounded(row.waits_s(status.clock)),
        "cpu_s": _rounded(usage.cpu_s) if usage else None,
        "memory_bytes": usage.memory_bytes if usage else None,
        "log": str(status.log_dir / row.log_name) if row.log_name else None,
        "log_time": _rounded(row.log_at),
        "last_line": row.last_line,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
