"""The report of a dry run, as JSON and as a trace. docs/reference/simulation.md has the fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from msrun.runtime.parallel.pipeline.schedule import Cell
from msrun.runtime.simulate.changes import Changes
from msrun.runtime.simulate.job import RankClass, SimulatedJob, StepTime
from msrun.runtime.simulate.recording import (
    ACTIVATIONS,
    BACKWARD,
    GRADIENTS,
    MESSAGES,
    RECOMPUTED,
    Span,
)
from msrun.runtime.simulate.step import StepRecord

FORMAT = 1
PARAMETERS, STATE = "parameters", "optimizer_state"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, RECOMPUTED, BACKWARD, MESSAGES)
"""What memory is for, in the order in which it is shown."""
LEVELS = {0: "plan", 1: "plan and memory", 2: "plan, memory and time", 3: "plan, memory, time, and steps of one rank"}
MICRO = 1e6


@dataclass(frozen=True)
class Measured:
    """What running the steps of one rank took here, with nothing sent; of level 3."""

    steps: int
    rank: int
    """That was run."""
    step_s: float
    """Mean."""
    process_bytes: int
    """Most memory of the whole process."""


@dataclass(frozen=True)
class Report:
    """Everything that a dry run says."""

    job: SimulatedJob
    level: int
    local_worker_num: int
    """Ranks on each host."""
    script: tuple[str, ...]
    notes: tuple[str, ...]
    changes: Changes | None = None
    """What other settings would do; of `msrun estimate`."""
    measured: Measured | None = None

    @property
    def hosts(self) -> int:
        """Hosts of the job."""
        return self.job.world_size // self.local_worker_num

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        step, device = self.job.step, self.job.device
        return {
            "format": FORMAT,
            "level": self.level,
            "script": list(self.script),
            "worker_num": self.job.world_size,
            "hosts": self.hosts,
            "local_worker_num": self.local_worker_num,
            "device": device.to_json(),
            "classes": [_class_json(found) for found in self.job.classes],
            "step": None if step is None else _step_json(step),
            "measured": None if self.measured is None else asdict(self.measured),
            "fits": self.job.fits if self.level else None,
            "changes": None if self.changes is None else self.changes.to_json(),
            "notes": list(self.notes),
            "plan": self.job.plan.to_json(),
        }


def memory_of(record: StepRecord) -> dict[str, int]:
    """Return the bytes of a rank at the fullest moment of a step by what they are for, in the order of `KINDS`."""
    parameters = record.parameter_bytes - record.host_parameter_bytes
    found = {PARAMETERS: parameters, STATE: record.optimizer_bytes - record.host_state_bytes, **record.at_peak}
    return {kind: found.get(kind, 0) for kind in KINDS}


def _class_json(found: RankClass) -> dict[str, Any]:
    value: dict[str, Any] = {
        "first_rank": found.ranks[0],
        "last_rank": found.ranks[-1],
        "rank": found.rank,
        "stages": list(found.stages),
        "traffic": None if found.plan.traffic is None else asdict(found.plan.traffic),
    }
    if found.record is None:
        return value
    record = found.record
    value["memory"] = {
        "peak_bytes": record.peak_bytes,
        "at_peak": memory_of(record),
        "parameter_bytes": record.parameter_bytes,
        "gradient_bytes": record.gradient_bytes,
        "optimizer_state_bytes": record.optimizer_bytes,
        "host_bytes": record.host_bytes,
        "optimizer": record.optimizer,
    }
    return value


def _step_json(step: StepTime) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "compute_s": step.compute_s,
        "messages_s": step.messages_s,
        "waits_s": step.waits_s,
        "overlap": step.overlap,
        "bubble": step.bubble,
    }


def build_trace(job: SimulatedJob) -> dict[str, Any]:
    """Return the step in Chrome's format, as `msrun trace` writes it: operators and messages of each class of ranks.

    Of a pipeline there are the actions of its schedule, too.
    """
    events: list[dict[str, Any]] = []
    rows = job.step.timeline if job.step is not None else ()
    for number, found in enumerate(job.classes):
        process = found.rank + 1
        last = f" to {found.ranks[-1]}" if len(found.ranks) > 1 else ""
        events.append(_name(process, "process_name", f"ranks {found.ranks[0]}{last}"))
        for row, name in enumerate(("operators", "messages", "schedule")[: 3 if rows else 2]):
            events.append(_name(process, "thread_name", name, row))
        assert found.record is not None
        events += [_span(process, span) for span in found.record.recording.spans]
        events += [_cell(process, cell) for cell in (rows[number] if rows else ())]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name(process: int, kind: str, name: str, row: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}


def _span(process: int, span: Span) -> dict[str, Any]:
    begin = round(span.begin_s * MICRO, 3)
    place = {"pid": process, "tid": int(span.is_message), "ts": begin, "dur": round(span.end_s * MICRO - begin, 3)}
    args: Mapping[str, Any] = {"bytes": span.nbytes, "ranks": len(span.ranks)} if span.is_message else {}
    return {"name": span.name, "cat": span.phase, "ph": "X", **place, "args": args}


def _cell(process: int, cell: Cell) -> dict[str, Any]:
    begin = round(cell.begin * MICRO, 3)
    place = {"pid": process, "tid": 2, "ts": begin, "dur": round(cell.end * MICRO - begin, 3)}
    return {"name": str(cell.action), "cat": "schedule", "ph": "X", **place, "args": {}}
