"""`--metrics_file FILE`: the job in numbers for Prometheus, as the textfile collector of its node exporter reads them.

The file is written anew every few seconds under another name and moved into place, so a reader sees a whole one. A
device or a named pipe is written into.
Source of the form: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrun.agent.observer import Observer
from msrun.agent.processes.process_control import Usage, session_usage
from msrun.agent.watch.progress_board import PROGRESS_BOARD, read_record
from msrun.cluster.membership import Membership, WorkerState
from msrun.errors import UsageError
from msrun.launch.directory.worker_log import read_log_end
from msrun.planning.plan import LaunchPlan
from ranktable.files import write_whole

INTERVAL_S = 5.0
MODE = 0o644
"""The exporter runs as another user."""
STATE_NAMES = {state: "stopped" if state is WorkerState.STOPPED else state.value for state in WorkerState}


@dataclass(frozen=True)
class Family:
    """One metric with its samples."""

    name: str
    kind: str
    """gauge or counter."""
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]


def render_families(families: Sequence[Family]) -> str:
    """Return metrics in Prometheus' text format; one without samples is left out."""
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{{{_labels(labels)}}} {_number(value)}" for labels, value in family.samples]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    text = value.encode("utf-8", "backslashreplace").decode()  # a path may be no text
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(value)


class MetricsFile(Observer):
    """Writes the file of one job. Owned by the launcher's event loop."""

    tick_s: float | None = INTERVAL_S

    def __init__(self, path: Path, plan: LaunchPlan, *, are_workers_here: bool, restarts: int = 0) -> None:
        """
        Args:
            are_workers_here: they run on this host, so that their memory can be seen.
            restarts: how often the job has started again before, on other hosts.

        Raises:
            UsageError: the file cannot be written.
        """
        self._path = path
        self._plan = plan
        self._board = Path(plan.run_dir, PROGRESS_BOARD)
        self._are_workers_here = are_workers_here
        self._began_at = time.time()
        self._restarts = restarts
        self._due = 0.0
        self._membership = Membership(worker.global_rank for worker in plan.workers)
        try:
            self._write(is_running=True, may_wait=True)
        except OSError as error:
            raise UsageError(
                f"--metrics_file {path}: cannot be written ({error.strerror}); give a file in a directory that you may "
                "write"
            ) from None

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Count restarts."""
        if kind == "restarting":
            self._restarts = int(fields["attempt"])

    def tick(self, membership: Membership) -> None:
        """Write when it is time."""
        self._membership = membership
        if time.monotonic() >= self._due:
            with contextlib.suppress(OSError):  # a full disk is no reason to end the job
                self._write(is_running=True)

    def finish(self, membership: Membership, exit_code: int) -> None:
        """Write how the job has ended; the file stays."""
        self._membership = membership
        with contextlib.suppress(OSError):
            self._write(is_running=False, exit_code=exit_code)

    def _write(self, *, is_running: bool, exit_code: int | None = None, may_wait: bool = False) -> None:
        self._due = time.monotonic() + INTERVAL_S
        text = render_families(self._families(is_running=is_running, exit_code=exit_code))
        write_whole(self._path, text.encode(), mode=MODE, may_wait=may_wait)

    def _families(self, *, is_running: bool, exit_code: int | None) -> list[Family]:
        job = {"job_id": self._plan.job_id}
        members = [self._membership.members[worker.global_rank] for worker in self._plan.workers]
        states = [
            ({**job, "state": name}, float(sum(member.state is state for member in members)))
            for state, name in STATE_NAMES.items()
        ]
        ended = [] if exit_code is None else [(job, float(exit_code))]
        info = {**job, "log_dir": self._plan.log_dir}
        return [
            Family("msrun_job_info", "gauge", "The job; always 1.", [(info, 1.0)]),
            Family("msrun_job_running", "gauge", "1 while the job runs.", [(job, float(is_running))]),
            Family("msrun_job_exit_code", "gauge", "Exit status of msrun, when the job has ended.", ended),
            Family("msrun_job_start_time_seconds", "gauge", "When the job began, since 1970.", [(job, self._began_at)]),
            Family(
                "msrun_restarts_total", "counter", "How often all workers were started again.", [(job, self._restarts)]
            ),
            Family("msrun_workers", "gauge", "Number of workers by state.", states),
            *self._worker_families(job),
        ]

    def _worker_families(self, job: Mapping[str, str]) -> list[Family]:
        everywhere = self._membership.running()
        running = {w.global_rank: everywhere[w.global_rank] for w in self._plan.workers if w.global_rank in everywhere}
        used = session_usage(running.values()) if self._are_workers_here else {}
        rows: dict[str, list[tuple[Mapping[str, str], float]]] = {name: [] for name in WORKER_METRICS}
        for host in self._plan.hosts:
            for worker in host.workers:
                if worker.global_rank in running:
                    labels = {**job, "rank": str(worker.global_rank), "host": host.name}
                    usage = used.get(running[worker.global_rank])
                    for name, value in self._read(worker.global_rank, Path(worker.log_path), usage).items():
                        if value is not None:
                            rows[name].append((labels, value))
        return [Family(name, *WORKER_METRICS[name], samples) for name, samples in rows.items()]

    def _read(self, global_rank: int, log: Path, usage: Usage | None) -> dict[str, float | None]:
        told, now = read_record(self._board, global_rank), time.monotonic()
        end = read_log_end(log).with_reported(told)
        ages = [
            *([now - told.step_at] if told.steps else []),
            *([time.time() - end.written_at] if end.written_at else []),
        ]
        return {
            "msrun_worker_step": end.step,
            "msrun_worker_steps_per_second": told.steps_per_s(now),
            "msrun_worker_loss": end.loss,
            "msrun_worker_memory_bytes": usage.memory_bytes if usage else None,
            "msrun_worker_cpu_seconds_total": usage.cpu_s if usage else None,
            "msrun_worker_last_progress_age_seconds": max(0.0, min(ages)) if ages else None,
        }


WORKER_METRICS = {
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
"""Metric of a running worker -> its kind and its description."""
