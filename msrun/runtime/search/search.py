"""The search of strategies: a plan of one call of a network that fits into the device and takes the least time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from msrun.errors import StrategyError, near_miss
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.events import LocalWorks, Operators, StepEvents, tell
from msrun.runtime.partition.partition import lower
from msrun.runtime.partition.price import GradientFlow, Price, StepSpec, price
from msrun.runtime.partition.program import Decisions
from msrun.runtime.search.problem import Problem, ProblemBuilder
from msrun.runtime.search.solvers import solve_dynamic, solve_exactly
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.operators.rule import LabelSplit

Splits = Mapping[str, LabelSplit]
_EXACT = "exact"
SEARCH_MODES = ("dynamic_programming", "recursive_programming", "sharding_propagation", _EXACT, "auto")
"""Words for a search: all mean dynamic programming, but for the one that asks for a linear program."""
_MEMORY_WEIGHTS = (0.0, 1 / 16, 1.0, 16.0, 256.0)
"""Prices of memory, beside the first plan's seconds per byte, at which plans are looked for, smaller and smaller ones:
whatever the limit is, so that more memory never leads to a slower plan."""
TIME_LIMIT_S = 60.0
MB = 2**20


@dataclass(frozen=True)
class SearchSpec:
    """What is searched for."""

    mode: str
    device: DeviceProfile
    memory_bytes: int | None = None
    """What a device may hold; None: what it has."""
    optimizer_states: int = 2
    """Tensors of a parameter's size that the optimizer keeps for it."""
    time_limit_s: float = TIME_LIMIT_S
    """No further plan is looked for afterwards; the fastest one always is."""

    def __post_init__(self) -> None:
        if self.mode not in SEARCH_MODES:
            raise StrategyError(
                f"search mode {self.mode!r}{near_miss(self.mode, SEARCH_MODES)}: one of {', '.join(SEARCH_MODES)}"
            )

    @property
    def limit_bytes(self) -> int:
        """What a step may take of a device."""
        return self.device.memory_bytes if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True)
class Plan:
    """Decisions and what they cost."""

    splits: Splits
    decisions: Decisions
    events: StepEvents
    price: Price
    name: str


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    plan: Plan
    data_parallel: Price
    """Of the plan that nobody would have to search for."""
    shards_optimizer: bool = False
    """Whether parameters must be stored cut by optimizer parallel, though the user did not ask for it."""
    limit_bytes: int = 0
    """What a step may take of a device."""
    activation_limit_bytes: int | None = None
    """What recomputation must bring the activations under; None: nothing needs to be recomputed."""
    cut_short: str = ""
    """How much of the search was done when its time was over; "": all of it."""

    @property
    def notes(self) -> list[str]:
        """What the plan's explanation says of the search."""
        ratio = f"{self.data_parallel.seconds / self.plan.price.seconds:.2f} times the searched plan's time"
        fits = "" if self.data_parallel.memory_bytes <= self.limit_bytes else ", which does not fit"
        lines = [
            f"searched ({self.plan.name}): {self.plan.price.summary}",
            f"data parallel instead: {self.data_parallel.summary}; {ratio}{fits}",
        ]
        if self.cut_short:
            lines.append(f"searched: {self.cut_short}; this is the best of their plans")
        if self.shards_optimizer:
            lines.append("searched: parameters and optimizer state are stored cut (hsdp level1), or they would not fit")
        if self.activation_limit_bytes is not None:
            limit = f"{self.activation_limit_bytes / MB:.1f} MB"
            lines.append(f"searched: modules are recomputed until activations fit into {limit}")
        return lines


class StepOf(Protocol):
    """Tells what of a step decisions do not say."""

    def __call__(self, decisions: Decisions, *, shards_all: bool) -> StepSpec:
        """With the user's optimizer parallel, or with that of every parameter."""
        ...


class Search:
    """The search of strategies for one captured call; the same on every rank that asks the same.

    Args:
        clock: seconds since any moment.
        fewest: of how many plans each rank has looked for when its time was over, the fewest on any rank: all ranks
            then choose among the same.
    """

    def __init__(
        self,
        captured: CapturedGraph,
        mesh: Mesh,
        constraints: Constraints,
        spec: SearchSpec,
        step_of: StepOf,
        *,
        clock: Callable[[], float] = time.monotonic,
        fewest: Callable[[int], int] = lambda count: count,
    ) -> None:
        self._clock, self._fewest = clock, fewest
        self._deadline = clock() + spec.time_limit_s
        self._cut_short = ""
        self._captured, self._mesh, self._given = captured, mesh, constraints
        self._spec, self._step_of, self._limit = spec, step_of, spec.limit_bytes
        self._operators = Operators(mesh)

    def run(self) -> Found:
        """Return the fastest plan that fits into a device.

        What does not fit is cut more; then optimizer parallel stores parameters cut; then modules are recomputed.
        """
        tried: list[Plan] = []
        for shards_all, plans in self.plans():
            fitting = [each for each in plans if each.price.memory_bytes <= self._limit]
            if fitting:
                best = min(fitting, key=lambda each: each.price.seconds)
                return self._found(best, shards_optimizer=shards_all and bool(best.price.gathered_bytes))
            tried += plans
        roomy = [each for each in tried if self._room(each) > 0]
        if roomy:
            best = min(roomy, key=self._recomputed_s)
            return self._found(
                best, shards_optimizer=bool(best.price.gathered_bytes), activation_limit_bytes=self._room(best)
            )
        raise self._does_not_fit(min(tried, key=lambda each: each.price.memory_bytes))

    def _room(self, plan: Plan) -> int:
        """Return the bytes that are left for activations."""
        return self._limit - (plan.price.memory_bytes - plan.price.activation_bytes)

    def _recomputed_s(self, plan: Plan) -> float:
        """Return the seconds of a step that runs the forward pass again for the activations that do not fit."""
        again = 1 - self._room(plan) / plan.price.activation_bytes
        return plan.price.seconds + again * plan.price.forward_s

    def _found(self, plan: Plan, *, shards_optimizer: bool, activation_limit_bytes: int | None = None) -> Found:
        return Found(plan, self._plain.price, shards_optimizer, self._limit, activation_limit_bytes, self._cut_short)

    def plans(self) -> Iterator[tuple[bool, list[Plan]]]:
        """Yield the plans that are looked at, whatever the limit is: with the user's optimizer parallel, and with
        that of every parameter."""
        plain = self._plain
        step = self._step_of(plain.decisions, shards_all=False)
        works, flow = LocalWorks(self._mesh, self._operators), GradientFlow.of(self._captured, plain.events)
        problem = ProblemBuilder(self._captured, self._given, self._spec.device, step, works, flow).build()
        found = [problem.splits(choice) for choice in self._choices(problem)]
        plans = [*(self._plan(splits, self._spec.mode) for splits in found), plain]
        yield False, plans
        yield True, [self._priced(plan, shards_all=True) for plan in plans]

    @cached_property
    def _plain(self) -> Plan:
        return self._plan({}, "data parallel")

    def _choices(self, problem: Problem) -> list[tuple[int, ...]]:
        """Return plans: the fastest one as choices are priced one by one, and smaller ones; as many as there is time
        for on every rank."""
        solve = solve_exactly if self._spec.mode == _EXACT else solve_dynamic
        found: list[tuple[int, ...]] = []
        unit = 0.0
        for weight in _MEMORY_WEIGHTS:
            if found and self._clock() > self._deadline:
                break
            found.append(tuple(solve(problem.weighing_memory(unit * weight))))
            unit = unit or problem.seconds(found[0]) / max(1.0, problem.memory(found[0]))
        count = self._fewest(len(found))
        if count < (asked := len(_MEMORY_WEIGHTS)):
            self._cut_short = f"the time limit of {self._spec.time_limit_s:g} s came after {count} of {asked} searches"
        return list(dict.fromkeys(found[:count]))

    def _plan(self, splits: Splits, name: str) -> Plan:
        decisions = decide(self._captured, self._mesh, replace(self._given, splits=splits, is_strict=False))
        events = tell(lower(self._captured, decisions), self._operators)
        return Plan(splits, decisions, events, self._price(decisions, events, shards_all=False), name)

    def _priced(self, plan: Plan, *, shards_all: bool) -> Plan:
        return replace(plan, price=self._price(plan.decisions, plan.events, shards_all=shards_all))

    def _price(self, decisions: Decisions, events: StepEvents, *, shards_all: bool) -> Price:
        step = self._step_of(decisions, shards_all=shards_all)
        return price(self._captured, decisions, self._spec.device, step, events=events)

    def _does_not_fit(self, least: Plan) -> StrategyError:
        cost, limit = least.price, self._limit
        sizes = {
            name: value.numel() * value.element_size()
            for node in self._captured.graph.nodes
            if (name := self._captured.parameters.get(node.name)) and (value := node.meta["val"]) is not None
        }
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        need, missing = cost.memory_bytes, cost.memory_bytes - limit
        kinds = cost.summary.memory_text
        return StrategyError(
            f"no strategy fits into {_size(limit)} of the device: the smallest step found needs {_size(need)}, "
            f"{_size(missing)} too much ({kinds}); the largest parameters are {', '.join(largest)}: give "
            "more ranks or memory, a smaller batch, or an optimizer with less state"
            + (f" ({self._cut_short})" if self._cut_short else "")
        )


def _size(size: float) -> str:
    return f"{size / MB:.1f} MB" if size >= MB else f"{size / 1024:.1f} KB"
