"""Pipeline schedules: who does what in which order, how long it takes in units of a forward pass, and the bubble.

The orders are torch's (see torch_schedules), save that of eager_1f1b. Words: a stage is a part of the network; a
pipeline rank holds one stage, or several ("interleaved", the V-shaped schedules). F is the forward pass of one micro
batch through one stage, B its backward pass, which the zero-bubble schedules split into I (gradients of the inputs) and
W (gradients of the weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from msrun.errors import StrategyError, near_miss
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.pipeline.torch_schedules import add_messages, map_stages, read_order
from msrun.runtime.partition.collective_messages import Totals
from msrun.runtime.partition.stages import StageAssignment

if TYPE_CHECKING:
    from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall


Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
COSTS: Mapping[str, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time of an action in units of a forward pass: a backward pass is two matrix products where forward is one."""


@dataclass(frozen=True)
class _Family:
    class_name: str | None
    """Of torch's schedule; None: the order is ours."""
    is_v: bool = False
    interleaves: bool = False
    """May hold several stages per rank."""


_FAMILIES = {
    "gpipe": _Family("GPipe"),
    "1f1b": _Family("1F1B"),
    "eager_1f1b": _Family(None),
    "interleaved": _Family("Interleaved1F1B", interleaves=True),
    "zero_bubble": _Family("InterleavedZeroBubble", interleaves=True),
    "zbv": _Family("ZBVZeroBubble", is_v=True, interleaves=True),
    "dualpipev": _Family("DualPipeV", is_v=True, interleaves=True),
}
SCHEDULERS = ("gpipe", "1f1b", "eager_1f1b", "zero_bubble", "zbv", "dualpipev")
"""Words of `AutoParallel.pipeline(scheduler=)`; "1f1b" with interleave=True is the interleaved schedule."""


@dataclass(frozen=True)
class Action:
    """One thing that a pipeline rank does."""

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def computes(self) -> bool:
        """True for what takes time on the device, False for sends and receives."""
        return self.kind in COSTS

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True)
class Cell:
    """A computing action with its time."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """The actions of all pipeline ranks."""

    name: str
    ranks: int
    """Pipeline ranks: stages of the world."""
    micro_size: int
    holder: tuple[int, ...]
    """stage of the network -> pipeline rank"""
    actions: tuple[tuple[Action, ...], ...]
    """Per pipeline rank."""

    @property
    def stages(self) -> int:
        """Number of stages of the network."""
        return len(self.holder)

    @property
    def splits_backward(self) -> bool:
        """True when the gradients of weights are computed apart from those of inputs."""
        return any(action.kind == "W" for row in self.actions for action in row)

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in order."""
        return tuple(stage for stage, rank in enumerate(self.holder) if rank == pipeline_rank)

    @cached_property
    def timeline(self) -> tuple[tuple[Cell, ...], ...]:
        """When every action begins and ends, if messages take no time."""
        return time_actions(self, lambda action: COSTS[action.kind])

    @property
    def length(self) -> float:
        """Time of a step, in units of a forward pass."""
        return max(row[-1].end for row in self.timeline)

    @property
    def bubble(self) -> float:
        """Share of the step in which a rank waits, mean over the ranks."""
        busy = sum(cell.end - cell.begin for row in self.timeline for cell in row)
        return 1 - busy / (self.ranks * self.length)

    @cached_property
    def most_held(self) -> int:
        """Most forward passes whose backward pass is not done, on any rank: what its activations take."""
        return max(_most_held(row) for row in self.actions)


def _most_held(actions: Sequence[Action]) -> int:
    is_split = any(action.kind == "W" for action in actions)
    steps = {"F": 1, "W" if is_split else "B": -1}
    return max(accumulate(steps.get(action.kind, 0) for action in actions))


def choose_schedule(scheduler: str, interleave: bool) -> str:
    """Return which schedule two settings ask for."""
    if scheduler not in SCHEDULERS:
        raise StrategyError(
            f"pipeline(scheduler={scheduler!r}){near_miss(str(scheduler), SCHEDULERS)}: "
            f"must be one of {', '.join(SCHEDULERS)}"
        )
    if interleave and scheduler == "1f1b":
        return "interleaved"
    if interleave and not _FAMILIES[scheduler].interleaves:
        raise StrategyError(f'pipeline(scheduler={scheduler!r}, interleave=True): use "1f1b" or "zero_bubble" with it')
    return scheduler


def default_chunks(name: str, interleave: bool) -> int:
    """Return how many stages each rank holds when the user names none."""
    return 2 if interleave or name == "interleaved" or _FAMILIES[name].is_v else 1


def build_schedule(name: str, ranks: int, chunks: int, micro_size: int) -> Schedule:
    """Return a schedule.

    Args:
        name: gpipe, 1f1b, eager_1f1b, interleaved, zero_bubble, zbv or dualpipev.
        ranks: pipeline ranks.
        chunks: stages per rank.
    """
    family = _FAMILIES[name]
    _check(name, family, ranks, chunks, micro_size)
    holder = map_stages(ranks, ranks * chunks, is_v=family.is_v)
    if family.class_name is None:
        order = eager_order(ranks, micro_size)
    else:
        order = read_order(family.class_name, ranks, ranks * chunks, micro_size)
    raw = add_messages(order, holder)
    actions = tuple(tuple(Action(kind, stage, micro) for kind, stage, micro in row) for row in raw)  # type: ignore[arg-type]
    return Schedule(name, ranks, micro_size, holder, actions)


def _check(name: str, family: _Family, ranks: int, chunks: int, micro_size: int) -> None:
    """Torch's constraints in our words."""
    stages = ranks * chunks
    if family.is_v and chunks != 2:
        raise StrategyError(f"{name}: {chunks} stages per rank; it needs exactly 2, so {2 * ranks} stages in all")
    if not family.interleaves and chunks != 1:
        raise StrategyError(
            f"{name}: {stages} stages for {ranks} pipeline ranks; it needs one stage per rank, or interleave=True"
        )
    least = {"1f1b": ranks, "dualpipev": stages}.get(name, 1)
    if micro_size < least:
        raise StrategyError(
            f"Pipeline(micro_size={micro_size}): {name} with {least} stages needs at least {least} micro batches"
        )
    rounds = max(1, micro_size // ranks)
    if name in ("interleaved", "zero_bubble") and micro_size % rounds:
        nearest = min(
            (n for n in range(1, 2 * micro_size + ranks) if n % max(1, n // ranks) == 0),
            key=lambda n: (abs(n - micro_size), -n),
        )
        raise StrategyError(
            f"Pipeline(micro_size={micro_size}): {name} on {ranks} pipeline ranks goes in {rounds} rounds, which must "
            f"divide the number of micro batches; the nearest legal number is {nearest}"
        )


def time_actions(schedule: Schedule, cost: Callable[[Action], float], delay: float = 0) -> tuple[tuple[Cell, ...], ...]:
    """Let every rank do its actions in order, each as soon as what it reads is there; return a row for each rank.

    Args:
        cost: time of an action.
        delay: time of a message between two ranks.
    """
    done: dict[tuple[str, int, int], float] = {}
    rows: list[list[Cell]] = [[] for _ in range(schedule.ranks)]
    waiting = [[action for action in row if action.computes] for row in schedule.actions]
    while any(waiting):
        moved = False
        for row, left in zip(rows, waiting, strict=True):
            while left and (begin := _ready_at(left[0], schedule, done, delay)) is not None:
                action = left.pop(0)
                begin = max(begin, row[-1].end if row else 0)
                end = begin + cost(action)
                row.append(Cell(action, begin, end))
                kind = "B" if action.kind == "I" else action.kind
                done[kind, action.stage, action.micro_batch] = end
                moved = True
        if not moved:
            stuck = ", ".join(str(left[0]) for left in waiting if left)
            raise RuntimeError(f"schedule {schedule.name} stands still before {stuck}")
    return tuple(tuple(row) for row in rows)


def _ready_at(
    action: Action, schedule: Schedule, done: Mapping[tuple[str, int, int], float], delay: float
) -> float | None:
    """Return when an action's input is there; None when it is not known yet."""
    stage, micro_batch = action.stage, action.micro_batch

    def arrived(kind: str, other: int) -> float | None:
        end = done.get((kind, other, micro_batch))
        is_here = schedule.holder[other] == schedule.holder[stage]
        return end if end is None or is_here else end + delay

    if action.kind == "F":
        return 0 if stage == 0 else arrived("F", stage - 1)
    if action.kind == "W":
        return done.get(("B", stage, micro_batch))
    own = done.get(("F", stage, micro_batch))
    after = own if stage == schedule.stages - 1 else arrived("B", stage + 1)
    return None if own is None or after is None else max(own, after)


def eager_order(ranks: int, micro_size: int) -> list[list[tuple[str, int, int]]]:
    """Return per pipeline rank, which holds the stage of its own number, (F or B, stage, micro batch) in order."""
    return [list(_of_rank(rank, ranks, micro_size)) for rank in range(ranks)]


def _of_rank(rank: int, ranks: int, micro_size: int) -> Iterator[tuple[str, int, int]]:
    ahead = min(micro_size, 2 * (ranks - rank) - 1)
    for micro_batch in range(ahead):
        yield "F", rank, micro_batch
    for micro_batch in range(micro_size):
        yield "B", rank, micro_batch
        if micro_batch + ahead < micro_size:
            yield "F", rank, micro_batch + ahead


AHEAD = 4
"""Computing actions that a receive is moved before: two micro batches forward and back."""


def receive_early(actions: Sequence[Action], ahead: int = AHEAD) -> tuple[Action, ...]:
    """Return a rank's actions with every receive before the `ahead` computing actions that precede it.

    Receives stay in their order among themselves, and so do sends, but a receive may pass a send: only for a backend
    that carries both ways at once (gloo; NCCL runs all messages of two ranks one after the other).
    """
    order: list[Action] = []
    for action in actions:
        order.insert(_place(order, ahead) if action.kind.startswith("RECV") else len(order), action)
    return tuple(order)


def _place(order: Sequence[Action], ahead: int) -> int:
    """Return where a receive that would stand at the end may stand."""
    passed = 0
    for place in range(len(order), 0, -1):
        before = order[place - 1]
        if before.kind.startswith("RECV") or (before.computes and passed == ahead):
            return place
        passed += before.computes
    return 0


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
