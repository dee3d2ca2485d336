"""Replay: what the executor forgets of a recomputed region after the forward pass, and how it gets it again.

Forward, the region's operators run with autograd but what they would save is thrown away at once, and so are the values
that only the region reads. Before its backward pass the same segments run again from what was kept: the region's
inputs, and what its spec saves. Random operators are functions of their step and place, so they repeat themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from msrun.runtime.partition.events import StepEvents
from msrun.runtime.partition.program import MODULE_PATH, ORIGIN, LocalProgram
from msrun.runtime.schedule.segments import Crossing, Name, Segment
from msrun.runtime.sharding.operators.rule import CHECKPOINT, IS_CAST, find_module

SavePolicy = Callable[[object], bool]


@dataclass(frozen=True)
class RecomputeSpec:
    """How one module is recomputed."""

    mp_comm_recompute: bool = True
    """Its collectives run again too; False keeps their results."""
    parallel_optimizer_comm_recompute: bool = False
    """Parameters that optimizer parallel has cut are freed after its forward pass and gathered again."""
    save: SavePolicy | None = None
    """Operators whose results are kept."""


@dataclass
class Region:
    """One call of a recomputed module."""

    path: str
    spec: RecomputeSpec
    nodes: list[str] = field(default_factory=list)
    """Names of its nodes in the local graph, in order."""


def find_regions(program: LocalProgram, specs: Mapping[str, RecomputeSpec]) -> list[Region]:
    """Return the regions in program order.

    Nodes that stand together and nothing of another module between them: then no value can leave a region and come
    back into it, so that it can be computed again at once.
    """
    regions: list[Region] = []
    current: Region | None = None
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        path = find_module(node.meta[MODULE_PATH], specs) if MODULE_PATH in node.meta else None
        if path is None and ORIGIN in node.meta and CHECKPOINT in node.meta[ORIGIN].meta:
            path = f"checkpoint {node.meta[ORIGIN].meta[CHECKPOINT]}"
        if path is None and current is not None and _casts_result_of(node, current):
            path = current.path
        if path is None:
            current = None
            continue
        if current is None or current.path != path:
            current = Region(path, specs.get(path, RecomputeSpec()))
            regions.append(current)
        current.nodes.append(node.name)
    return regions


def _casts_result_of(node: fx.Node, region: Region) -> bool:
    """Return whether autocast has put a cast between the operators of a module, such as the parts of one result."""
    captured = node.meta.get(ORIGIN)
    return captured is not None and IS_CAST in captured.meta and node.all_input_nodes[0].name in region.nodes


def parameters_of(program: LocalProgram, regions: Sequence[Region]) -> set[str]:
    """Return the names of parameters that only these regions read."""
    inside = {name for region in regions for name in region.nodes}
    return {
        name
        for name, use in program.parameters.items()
        if use.node.users and all(reader.name in inside for reader in use.node.users if reader.op == "call_function")
    }


@dataclass(frozen=True)
class Replay:
    """How one region is forgotten and run again."""

    segments: tuple[int, ...]
    """Its segments, in order."""
    crossings: dict[int, list[Crossing]]
    """segment -> collectives that start again with it, or with what it computed once"""
    dropped: frozenset[Name]
    """Values that only the region reads and that are not kept."""
    save: SavePolicy | None

    @property
    def last(self) -> int:
        """The last of its segments."""
        return self.segments[-1]

    @property
    def steps(self) -> list[int]:
        """Segments that take part when it runs again, in order."""
        return sorted({*self.segments, *self.crossings})


@dataclass
class SavedResults:
    """Results that one copy keeps of one segment, because of the user's choice of operators."""

    policy: SavePolicy
    _is_saving: bool = False
    _contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = field(init=False)

    def __post_init__(self) -> None:
        self._contexts = create_selective_checkpoint_contexts(self._choose)

    def run(self, module: fx.GraphModule, inputs: Sequence[Tensor], *, again: bool) -> Any:
        """Run a segment; the second time results that were saved are taken instead of computed."""
        with self._contexts[again]:
            return _Marking(module, self).run(*inputs)

    def mark(self, target: object) -> None:
        """Say which operator of the segment runs next; the dispatcher sees only the operators that it is made of."""
        self._is_saving = self.policy(target)

    def _choose(self, _context: Any, operator: torch._ops.OpOverload, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_saved = self._is_saving and not operator.is_view
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


class _Marking(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, results: SavedResults) -> None:
        super().__init__(module)
        self._results = results

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function":
            self._results.mark(n.target)
        return super().run_node(n)


@contextmanager
def forgetting() -> Iterator[None]:
    """Let autograd save nothing: the same operators run as with a gradient, and nothing of them stays."""
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _refuse):
        yield


def _refuse(_nothing: None) -> Tensor:
    raise RuntimeError("the backward pass of a recomputed region began before it was run again")


def plan_replays(segments: Sequence[Segment], regions: Sequence[Region], outputs: Sequence[Any]) -> list[Replay]:
    """Return how every region is forgotten and run again."""
    readers = _readers(segments)
    results = {node.name for node in outputs if isinstance(node, fx.Node)}
    replays = []
    for number, region in enumerate(regions):
        own = [index for index, segment in enumerate(segments) if segment.region == number and not segment.is_empty]
        made = {name for index in own for name in segments[index].writes}
        crossings = [
            (index, crossing)
            for index, segment in enumerate(segments)
            for crossing in segment.crossings
            if crossing.region == number
        ]
        if region.spec.mp_comm_recompute:
            made |= {crossing.result for _, crossing in crossings}
        else:
            made |= {crossing.result for _, crossing in crossings if crossing.collective.is_local}
        dropped = frozenset(n for n in made if n not in results and readers.get(n, set()) <= {number})
        again: dict[int, list[Crossing]] = {}
        for index, crossing in crossings:
            if crossing.result in dropped:
                again.setdefault(index, []).append(crossing)
        if own:
            replays.append(Replay(tuple(own), again, dropped, region.spec.save))
        else:  # nothing but collectives: nothing to gain
            replays.append(Replay((), {}, frozenset(), None))
    return replays


def _readers(segments: Sequence[Segment]) -> dict[Name, set[int | None]]:
    """Return value -> the regions that read it; None stands for what lies in no region."""
    readers: dict[Name, set[int | None]] = {}
    for segment in segments:
        for name in segment.reads:
            readers.setdefault(name, set()).add(segment.region)
        for crossing in segment.crossings:
            readers.setdefault(crossing.source, set()).add(crossing.region)
    return readers


def forward_slots(segments: Sequence[Segment], gathered: Set[int]) -> list[list[int]]:
    """Return the segments' indexes, in order, in slots.

    Args:
        gathered: fusion groups of parameters that travel before they are used.
    """
    slots: list[list[int]] = []
    flying: set[Name] = set()
    for index, segment in enumerate(segments):
        waits = flying & {*segment.reads, *(crossing.source for crossing in segment.crossings)}
        if not slots or waits or gathered & set(segment.new_groups):
            slots.append([])
            flying = set()
        slots[-1].append(index)
        flying |= {crossing.result for crossing in segment.crossings if not crossing.collective.is_local}
    return slots


def way_back(segments: Sequence[Segment]) -> list[int]:
    """Return the segments' indexes in the order of the backward pass: the last one first.

    Of two segments of one level the host's comes first, as on the way forward; but in order where they are recomputed.
    """
    order = list(reversed(range(len(segments))))
    for place, (index, before) in enumerate(pairwise(order)):
        one, host = segments[index], segments[before]
        is_beside = host.on_host and not one.on_host and host.level == one.level
        if is_beside and one.region is None and host.region is None:
            order[place], order[place + 1] = before, index
    return order


def backward_slots(segments: Sequence[Segment], gathered: Set[int], replayed: Set[int]) -> list[list[int]]:
    """Return the segments' indexes, last one first, in slots.

    The way back of a segment is followed at once by that of the collectives of the next one, which may have to wait for
    other collectives' gradients.

    Args:
        replayed: last segments of recomputed regions, which all copies compute again before any goes on.
    """
    slots: list[list[int]] = []
    flying: set[Name] = set()
    gives_back = True
    order = way_back(segments)
    for place, index in enumerate(order):
        before = segments[order[place + 1]].crossings if place + 1 < len(order) else []
        waits = flying & {*segments[index].writes, *(crossing.result for crossing in before)}
        if gives_back or waits or index in replayed:
            slots.append([])
            flying = set()
        slots[-1].append(index)
        flying |= {crossing.source for crossing in before if crossing.collective.moves_backward}
        gives_back = bool(gathered & set(segments[index].new_groups))
    return slots


def join_slots(slots: Sequence[Sequence[int]], spans: Sequence[range]) -> list[list[int]]:
    """Return slots of which none ends inside a span: segments that a copy runs without a break."""
    span_of = {index: span for span in spans for index in span}
    joined: list[list[int]] = []
    for slot in slots:
        if joined and slot[0] in span_of and span_of[slot[0]].start < slot[0]:
            joined[-1] += slot
        else:
            joined.append(list(slot))
    return joined


@dataclass(frozen=True)
class ActivationEstimate:
    """Bytes on one rank, during one micro batch."""

    kept_bytes: int
    """From the forward to the backward pass, per copy."""
    again_bytes: int
    """More for the recomputed region that needs most, while it is run again; per copy."""
    copies: int

    @property
    def peak_bytes(self) -> int:
        """At the most, of all copies."""
        return self.copies * (self.kept_bytes + self.again_bytes)

    def __str__(self) -> str:
        copies = f" for each of {self.copies} copies" if self.copies > 1 else ""
        return (
            f"activations {self.peak_bytes / 2**20:.2f} MB: {self.kept_bytes / 2**20:.2f} MB kept and "
            f"{self.again_bytes / 2**20:.2f} MB computed again{copies}"
        )


def estimate_activations(
    events: StepEvents, segments: Sequence[Segment], replays: Sequence[Replay], copies: int
) -> ActivationEstimate:
    """Return what a training step keeps."""
    estimate = _Estimate(events, segments, replays)
    kept = estimate.forward()
    again = [estimate.bytes_again(replay, kept) for replay in replays]
    return ActivationEstimate(estimate.nbytes(kept), max(again, default=0), copies)


class _Estimate:
    """Sums up the memory of the events of a step, as its segments keep and forget it."""

    def __init__(self, events: StepEvents, segments: Sequence[Segment], replays: Sequence[Replay]) -> None:
        self._storages, self._given = events.storages, events.given
        self._segments, self._replays = segments, replays
        self._memory = {node.name: value.storage for node, value in events.values.items()}
        self._saved = {event.node.name: event.saved for event in events.events}
        crossings = [crossing for segment in segments for crossing in segment.crossings]
        self._on_host = {name for segment in segments if segment.on_host for name in segment.writes}
        self._on_host |= {each.result for each in crossings if each.collective.kind == "to_host"}
        self._same = {self._memory[c.result]: self._memory[c.source] for c in crossings if c.takes_source}
        """memory of a collective's result -> that of its source, which it is written to"""

    def forward(self) -> set[int]:
        """Return the memory that is kept after the forward pass."""
        kept, values = set[int](), set[Name]()
        for index, segment in enumerate(self._segments):
            replay = None if segment.region is None else self._replays[segment.region]
            if replay is None and not segment.on_host:
                kept |= self._saved_in(segment)
            elif replay is not None and (keeps := replay.save) is not None:
                chosen = {node.name for node in _operators(segment) if keeps(node.target)}
                kept |= {self._memory[name] for name in chosen & self._memory.keys()}
            values |= {*segment.writes, *(crossing.result for crossing in segment.crossings)}
            if replay is not None and index == replay.last:
                values -= replay.dropped
        return kept | {self._memory[name] for name in values - self._on_host}

    def bytes_again(self, replay: Replay, kept: Set[int]) -> int:
        """Return the bytes that a region takes beside what is kept when it runs again: what it makes is made anew."""
        found, names = set[int](), set[Name]()
        for index in replay.steps:
            if index in replay.segments:
                names |= {node.name for node in _operators(self._segments[index])}
                found |= self._saved_in(self._segments[index]) if not self._segments[index].on_host else set()
            results = {crossing.result for crossing in replay.crossings.get(index, [])}
            names |= results
            found |= {self._memory[name] for name in results - self._on_host}
        return self.nbytes({n for n in found if n not in kept or self._storages[n].maker.name in names})

    def nbytes(self, memory: Set[int]) -> int:
        """Return the bytes of memory, what is there before the step left out."""
        found = {self._same.get(number, number) for number in memory} - self._given
        return sum(self._storages[number].nbytes for number in found)

    def _saved_in(self, segment: Segment) -> set[int]:
        """Return what the operators of a segment save, and what it gives to others."""
        saved = set[int]().union(*(self._saved.get(node.name, ()) for node in _operators(segment)))
        return saved | {self._memory[name] for name in segment.writes}


def _operators(segment: Segment) -> list[fx.Node]:
    return [node for node in segment.module.graph.nodes if node.op == "call_function"]
