"""PipelinePlan: which stage holds what, what crosses the borders, and the schedule; for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msrun.runtime.parallel.pipeline.schedule import Schedule, build_schedule
from msrun.runtime.parallel.pipeline.schedule_picture import describe_schedule
from msrun.runtime.parallel.user_name import user_name
from msrun.runtime.partition.collective_messages import Totals
from msrun.runtime.partition.stage_assignment import StageAssignment

if TYPE_CHECKING:
    from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall


@dataclass(frozen=True)
class BorderPlan:
    """One value that travels between two neighbouring stages, for every micro batch and copy."""

    from_stage: int
    name: str
    shape: tuple[int, ...]
    """Of the part that one rank sends."""
    nbytes: int
    has_gradient: bool
    """A gradient of the same size comes back."""


@dataclass(frozen=True)
class StagePlan:
    """One part of the network."""

    number: int
    ranks: tuple[int, ...]
    """World ranks that hold it."""
    parameters: tuple[str, ...]
    operators: tuple[str, ...]
    """Captured operators, in order."""
    cost_share: float
    """Of the cost of all stages."""


@dataclass(frozen=True)
class PipelinePlan:
    """Every decision about the stages of one network."""

    ranks: int
    """Pipeline ranks: parts of the world."""
    ranks_per_stage: int
    schedule: str
    micro_size: int
    reason: str
    """Who divided the network."""
    bubble: float
    """Share of a step that a rank waits, if messages take no time and a backward pass twice a forward pass."""
    stages: tuple[StagePlan, ...]
    borders: tuple[BorderPlan, ...]
    traffic: tuple[Totals, ...] = ()
    """All messages of one training step of a rank, for every pipeline rank."""

    def build_schedule(self) -> Schedule:
        """Return the actions of all pipeline ranks."""
        return build_schedule(self.schedule, self.ranks, len(self.stages) // self.ranks, self.micro_size)

    def summary(self) -> str:
        """Return the division of the ranks in words."""
        size = f"{self.ranks_per_stage} rank{'s' if self.ranks_per_stage > 1 else ''}"
        return f"{self.ranks} stages ({self.schedule}, {self.micro_size} micro batches, {size} each)"

    def lines(self) -> list[str]:
        """Return the stages as a table: ranks, share of the cost, parameters, and what leaves them."""
        found = [f"stages, divided by {self.reason}; {describe_schedule(self.build_schedule())}"]
        for stage in self.stages:
            ranks = ", ".join(map(str, stage.ranks))
            found.append(
                f"  stage {stage.number} on ranks {ranks}: {100 * stage.cost_share:.0f} % of the cost, "
                f"{len(stage.operators)} operators, parameters {', '.join(stage.parameters) or 'none'}"
            )
            for border in (b for b in self.borders if b.from_stage == stage.number):
                shape = "x".join(map(str, border.shape)) or "()"
                back = ", and its gradient back" if border.has_gradient else ""
                found.append(f"      sends {border.name} {shape}, {border.nbytes} B per micro batch{back}")
        return found

    def traffic_lines(self) -> list[str]:
        """Return what a rank of each part of the world moves in a training step."""
        schedule = self.build_schedule()
        found = []
        for rank, totals in enumerate(self.traffic):
            stages = [str(stage) for stage in schedule.stages_of(rank)]
            where = f"stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"
            found.append(f"one training step, on each rank of {where}: {totals}")
        return found


def build_pipeline_plan(call: PipelinedCall, assignment: StageAssignment, traffic: Sequence[Totals]) -> PipelinePlan:
    """Put every decision about the stages of one captured call together.

    Args:
        traffic: of a training step, for every pipeline rank.
    """
    schedule = call.schedule
    size = call.program.mesh.size
    total = sum(assignment.costs) or 1.0
    stages = [
        StagePlan(
            number=stage.index,
            ranks=tuple(range(schedule.holder[stage.index] * size, (schedule.holder[stage.index] + 1) * size)),
            parameters=tuple(user_name(name) for name in stage.program.parameters),
            operators=tuple(node.name for node, at in assignment.stage_of.items() if at == stage.index),
            cost_share=assignment.costs[stage.index] / total,
        )
        for stage in call.stages
    ]
    borders = [
        BorderPlan(stage.index, v.name, v.value.shape, v.value.nbytes * call.copies, v.has_gradient)
        for stage in call.stages
        for v in stage.sent
    ]
    return PipelinePlan(
        ranks=schedule.ranks,
        ranks_per_stage=size,
        schedule=schedule.name,
        micro_size=schedule.micro_size,
        reason=assignment.reason,
        bubble=schedule.bubble,
        stages=tuple(stages),
        borders=tuple(borders),
        traffic=tuple(traffic),
    )
