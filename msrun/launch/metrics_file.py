"""`--metrics_file FILE`: the job in numbers for Prometheus' node exporter, moved into place whole every few seconds; a
device or a named pipe is written into. Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrun.agent.observer import Observer
from msrun.agent.processes.process_control import session_usage
from msrun.agent.processes.progress_board import PROGRESS_BOARD, read_record
from msrun.cluster.membership import Membership, WorkerState
from msrun.errors import refused_as
from msrun.launch.directory.worker_log import read_log_end
from msrun.planning.plan import LaunchPlan
from ranktable.files import write_whole

INTERVAL_S = 5.0
MODE = 0o644  # the exporter runs as another user
STATE_NAMES = {state: "stopped" if state is WorkerState.STOPPED else state.value for state in WorkerState}
METRICS = {  # metric -> its kind and its description; those of a worker are there while it runs
    "msrun_job_info": ("gauge", "The job; always 1."),
    "msrun_job_running": ("gauge", "1 while the job runs."),
    "msrun_job_exit_code": ("gauge", "Exit status of msrun, when the job has ended."),
    "msrun_job_start_time_seconds": ("gauge", "When the job began, since 1970."),
    "msrun_restarts_total": ("counter", "How often all workers were started again."),
    "msrun_workers": ("gauge", "Number of workers by state."),
    "msrun_worker_step": ("gauge", "Training steps begun."),
    "msrun_worker_steps_per_second": ("gauge", "Speed over the last 5 to 10 s."),
    "msrun_worker_loss": ("gauge", "Newest loss."),
    "msrun_worker_memory_bytes": ("gauge", "Resident memory of the processes of the worker."),
    "msrun_worker_cpu_seconds_total": ("counter", "Processor time of the processes of the worker."),
    "msrun_worker_last_progress_age_seconds": (
        "gauge",
        "Seconds since the newest step began or the worker wrote to its log.",
    ),
}


Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]  # metric -> its values, each with its labels


def render_samples(found: Samples) -> str:
    """Return metrics in Prometheus' text format; one without samples is left out."""
    lines: list[str] = []
    for name, samples in found.items():
        if samples:
            kind, what = METRICS[name]
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{{{_labels(labels)}}} {_number(value)}" for labels, value in samples]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    texts = {name: value.encode("utf-8", "backslashreplace").decode() for name, value in labels.items()}  # odd paths
    escape = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{text.translate(escape)}"' for name, text in texts.items())


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(value)


class MetricsFile(Observer):
    """Writes the file of one job. Owned by the launcher's event loop."""

    tick_s: float | None = INTERVAL_S

    def __init__(self, path: Path, plan: LaunchPlan, *, are_workers_here: bool, restarts: int = 0) -> None:
        """Write the first numbers (UsageError). `are_workers_here`: their memory is seen; `restarts`: before."""
        self._path = path
        self._plan = plan
        self._board = Path(plan.run_dir, PROGRESS_BOARD)
        self._are_workers_here = are_workers_here
        self._began_at = time.time()
        self._restarts = restarts
        self._due = 0.0
        remedy = "give a file in a directory that you may write"
        with refused_as(f"--metrics_file {path}: cannot be written", remedy):
            self._write(Membership(worker.global_rank for worker in plan.workers), may_wait=True)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "restarting":
            self._restarts = int(fields["attempt"])

    def tick(self, membership: Membership) -> None:
        if time.monotonic() >= self._due:
            with contextlib.suppress(OSError):  # a full disk is no reason to end the job
                self._write(membership)

    def finish(self, membership: Membership, exit_code: int) -> None:
        with contextlib.suppress(OSError):
            self._write(membership, exit_code)

    def _write(self, membership: Membership, exit_code: int | None = None, *, may_wait: bool = False) -> None:
        self._due = time.monotonic() + INTERVAL_S
        job = {"job_id": self._plan.job_id}
        states = [membership.members[worker.global_rank].state for worker in self._plan.workers]
        found: dict[str, list[tuple[Mapping[str, str], float]]] = {name: [] for name in METRICS}
        found |= {
            "msrun_job_info": [({**job, "log_dir": self._plan.log_dir}, 1.0)],
            "msrun_job_running": [(job, float(exit_code is None))],
            "msrun_job_exit_code": [] if exit_code is None else [(job, float(exit_code))],
            "msrun_job_start_time_seconds": [(job, self._began_at)],
            "msrun_restarts_total": [(job, self._restarts)],
            "msrun_workers": [({**job, "state": n}, float(states.count(state))) for state, n in STATE_NAMES.items()],
        }
        running = membership.running()
        own = [
            (host, w, running[w.global_rank])
            for host in self._plan.hosts
            for w in host.workers
            if w.global_rank in running
        ]
        used = session_usage(pid for _, _, pid in own) if self._are_workers_here else {}
        for host, worker, pid in own:
            labels = {**job, "rank": str(worker.global_rank), "host": host.name}
            usage, now = used.get(pid), time.monotonic()
            told = read_record(self._board, worker.global_rank)
            log = read_log_end(Path(worker.log_path)).with_reported(told)
            ages = [now - told.step_at] if told.steps else []
            ages += [time.time() - log.written_at] if log.written_at is not None else []
            for name, value in (
                ("step", log.step),
                ("steps_per_second", told.steps_per_s(now)),
                ("loss", log.loss),
                ("memory_bytes", usage.memory_bytes if usage else None),
                ("cpu_seconds_total", usage.cpu_s if usage else None),
                ("last_progress_age_seconds", max(0.0, min(ages)) if ages else None),
            ):
                found[f"msrun_worker_{name}"] += [(labels, value)] if value is not None else []
        write_whole(self._path, render_samples(found).encode(), mode=MODE, may_wait=may_wait)
