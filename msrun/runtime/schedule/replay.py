"""Replay: what the executor forgets of a recomputed region after the forward pass, and how it gets it again.

Forward, the region's operators run with autograd but what they would save is thrown away at once, and so are the values
that only the region reads. Before its backward pass the same segments run again from what was kept: the region's
inputs, and what its spec saves. Random operators are functions of their step and place, so they repeat themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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
