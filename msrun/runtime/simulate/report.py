"""The report of a dry run, and as JSON. docs/reference/simulation.md has the fields."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from msrun.runtime.simulate.changes import Changes
from msrun.runtime.simulate.job import RankClass, SimulatedJob, StepTime
from msrun.runtime.simulate.recording import (
    ACTIVATIONS,
    BACKWARD,
    GRADIENTS,
    MESSAGES,
    RECOMPUTED,
)
from msrun.runtime.simulate.step import StepRecord

FORMAT = 1
PARAMETERS, STATE = "parameters", "optimizer_state"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, RECOMPUTED, BACKWARD, MESSAGES)
"""What memory is for, in the order in which it is shown."""
LEVELS = {0: "plan", 1: "plan and memory", 2: "plan, memory and time", 3: "plan, memory, time, and steps of one rank"}


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
    found = {PARAMETERS: record.parameter_bytes, STATE: record.optimizer_bytes, **record.at_peak}
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
