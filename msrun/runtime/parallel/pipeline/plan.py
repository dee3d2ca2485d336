"""PipelinePlan: which stage holds what, what crosses the borders, and the schedule; for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from msrun.runtime.parallel.pipeline.schedule import Action, Cell, Schedule, build_schedule
from msrun.runtime.parallel.user_name import user_name
from msrun.runtime.partition.collective_messages import Totals
from msrun.runtime.partition.stages import StageAssignment

if TYPE_CHECKING:
    from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall


COLOURS = {"F": "#8fb8de", "B": "#a8d5a2", "I": "#c9e4c5", "W": "#f2d388"}
WORDS = {
    "F": "F forward",
    "B": "B backward",
    "I": "I gradients of inputs",
    "W": "W gradients of weights",
}
MAX_TICKS = 40
_IDLE = "#eeeeee"
_UNIT, _ROW, _LEFT, _TOP = 34, 30, 84, 40
_TITLE_CHAR, _TEXT_CHAR = 9.0, 7.2
"""Width that a letter of 15 and of 12 pixels takes at most, on average, in a sans-serif font."""


def describe_schedule(schedule: Schedule) -> str:
    """Return name, sizes, bubble and what the fullest rank holds in one line."""
    chunks = schedule.stages // schedule.ranks
    held = f", {chunks} on each rank" if chunks > 1 else ""
    return (
        f"{schedule.name}: {schedule.stages} stages{held}, {schedule.micro_size} micro batches, "
        f"bubble {100 * schedule.bubble:.1f} %, at most {schedule.most_held} forward passes held"
    )


def render_text(schedule: Schedule) -> str:
    """Return the order of a step as a table; a dot is a pause, a dash means that the action goes on.

    A cell is KIND and micro batch; before it stands the stage where ranks hold several.
    """
    width = max(len(_label(schedule, cell.action)) for row in schedule.timeline for cell in row)
    lines = [describe_schedule(schedule)]
    for rank, row in enumerate(schedule.timeline):
        columns = ["."] * round(schedule.length)
        for cell in row:
            begin, end = round(cell.begin), round(cell.end)
            columns[begin:end] = [_label(schedule, cell.action), *"-" * (end - begin - 1)]
        lines.append(f"{_name(schedule, rank)}  " + " ".join(f"{column:<{width}}" for column in columns).rstrip())
    return "\n".join(lines)


def render_svg(schedule: Schedule) -> str:
    """Return the order of a step as an SVG document, with a time axis and a legend."""
    title = describe_schedule(schedule)
    end = _LEFT + _UNIT * round(schedule.length)
    below = _TOP + _ROW * schedule.ranks
    legend, legend_end = _svg_legend(schedule, below + 62)
    width = max(end, round(10 + _TITLE_CHAR * len(title)), legend_end) + 20
    height = below + 84
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text font-size="15" x="10" y="24">{escape(title)}</text>',
    ]
    for rank, row in enumerate(schedule.timeline):
        y = _TOP + _ROW * rank
        parts.append(f'<text font-size="12" x="10" y="{y + 19}">{escape(_name(schedule, rank).strip())}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{end - _LEFT}" height="{_ROW - 4}" fill="{_IDLE}"/>')
        parts += [_svg_cell(schedule, cell, y) for cell in row]
    return "\n".join([*parts, *_svg_axis(schedule, below + 2), *legend, "</svg>", ""])


def _svg_axis(schedule: Schedule, y: int) -> list[str]:
    """Return the axis of time below the rows."""
    length = round(schedule.length)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, length) if length / step <= MAX_TICKS)
    end = _LEFT + _UNIT * length
    parts = [f'<line class="axis" x1="{_LEFT}" y1="{y}" x2="{end}" y2="{y}" stroke="#333333"/>']
    for time in range(0, length + 1, step):
        x = _LEFT + _UNIT * time
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x}" y2="{y + 5}" stroke="#333333"/>')
        parts.append(f'<text class="tick" font-size="11" x="{x}" y="{y + 18}" text-anchor="middle">{time}</text>')
    parts.append(f'<text font-size="12" x="{_LEFT}" y="{y + 38}">time, in forward passes of a micro batch</text>')
    return parts


def _svg_legend(schedule: Schedule, y: int) -> tuple[list[str], int]:
    """Return what the colours and letters mean, and where it ends."""
    kinds = [kind for kind in COLOURS if any(c.action.kind == kind for row in schedule.timeline for c in row)]
    label = "1F0: stage 1, forward, micro batch 0" if schedule.stages > schedule.ranks else "F0: forward, micro batch 0"
    parts, x = [], _LEFT
    for colour, words in [*((COLOURS[kind], WORDS[kind]) for kind in kinds), (_IDLE, "idle"), ("", label)]:
        if colour:
            parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}" stroke="#666666"/>')
            x += 20
        parts.append(f'<text class="legend" font-size="12" x="{x}" y="{y + 12}">{words}</text>')
        x += round(_TEXT_CHAR * len(words)) + 16
    return parts, x


def _svg_cell(schedule: Schedule, cell: Cell, y: int) -> str:
    x, width = _LEFT + _UNIT * round(cell.begin), _UNIT * round(cell.end - cell.begin)
    round_of_rank = schedule.stages_of(schedule.holder[cell.action.stage]).index(cell.action.stage)
    edge = "#666666" if round_of_rank % 2 == 0 else "#000000"
    label = escape(_label(schedule, cell.action))
    return (
        f'<g class="{cell.action.kind}"><title>{escape(str(cell.action))}</title>'
        f'<rect x="{x}" y="{y}" width="{width}" height="{_ROW - 4}" fill="{COLOURS[cell.action.kind]}" '
        f'stroke="{edge}" stroke-width="{1 + round_of_rank % 2}"/>'
        f'<text font-size="12" x="{x + width / 2:g}" y="{y + 18}" text-anchor="middle">{label}</text></g>'
    )


def _label(schedule: Schedule, action: Action) -> str:
    stage = str(action.stage) if schedule.stages > schedule.ranks else ""
    return f"{stage}{action.kind}{action.micro_batch}"


def _name(schedule: Schedule, rank: int) -> str:
    """Return the head of a row: a pipeline rank, as the field calls the ranks that hold the same stages."""
    return f"pp rank {rank:<{len(str(schedule.ranks - 1))}}"


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
