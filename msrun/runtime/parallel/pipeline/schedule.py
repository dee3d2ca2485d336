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
from itertools import accumulate
from typing import Literal

from msrun.errors import StrategyError, near_miss
from msrun.runtime.parallel.pipeline.torch_schedules import add_messages, map_stages, read_order

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
    """Return which schedule two settings ask for.

    Raises:
        StrategyError: an unknown word, or interleaving for a schedule that has none.
    """
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

    Raises:
        StrategyError: a number of micro batches or of stages that the schedule cannot have.
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
