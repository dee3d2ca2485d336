"""Replay: what the executor forgets of a recomputed region after the forward pass, and how it gets it again.

Forward, the region's operators run with autograd but what they would save is thrown away at once, and so are the values
that only the region reads. Before its backward pass the same segments run again from what was kept: the region's
inputs, and what its spec saves. Random operators are functions of their step and place, so they repeat themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.partition.local_work import cross_on_fakes
from msrun.runtime.partition.program import MODULE_PATH, ORIGIN, LocalProgram
from msrun.runtime.schedule.segments import Crossing, Name, Segment
from msrun.runtime.sharding.layout import Mesh
from msrun.runtime.sharding.operators.rule import CHECKPOINT, IS_CAST, fake_given, find_module

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


class _Storages:
    """A set of storages, counted in bytes."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._kept: list[Tensor] = []
        """So that no storage comes to have another's address."""
        self._bytes: dict[int, int] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(tensor)
        self._bytes[storage._cdata] = storage.nbytes()

    def bytes_beside(self, *others: _Storages) -> int:
        """Return the bytes of storages that none of the others holds."""
        return sum(size for key, size in self._bytes.items() if all(key not in other._bytes for other in others))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Add what autograd saves."""

        def pack(tensor: Tensor) -> Tensor:
            self.add(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def estimate_activations(
    captured: CapturedGraph,
    program: LocalProgram,
    segments: Sequence[Segment],
    replays: Sequence[Replay],
    buffers: Mapping[Name, Tensor],
    trainable: frozenset[str],
    copies: int,
) -> ActivationEstimate:
    """Return what a training step keeps.

    Args:
        buffers: placeholder -> value.
        trainable: names of parameters that have a gradient.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.enable_grad():
        values = _given(captured, program, buffers, trainable, mode)
        run = _Run(program.mesh, segments, replays, values)
        return ActivationEstimate(run.forward(), run.again(), copies)


def _given(
    captured: CapturedGraph,
    program: LocalProgram,
    buffers: Mapping[Name, Tensor],
    trainable: frozenset[str],
    mode: FakeTensorMode,
) -> dict[Name, Tensor]:
    """Return placeholder -> a fake tensor of what it holds on a rank."""
    seen = {node.name: node.meta["val"] for node in captured.graph.nodes if node.op == "placeholder"}
    values: dict[Name, Tensor] = {name: mode.from_tensor(value) for name, value in buffers.items()}
    values |= fake_given()
    for name, use in program.parameters.items():
        device = seen[use.node.name].device
        fake = torch.empty(use.layout.local_shape(program.mesh, use.shape), dtype=use.dtype, device=device)
        values[use.node.name] = fake.requires_grad_(name in trainable)
    for node, layout in zip(program.inputs, program.input_layouts, strict=True):
        whole = seen[node.name]
        fake = torch.empty(layout.local_shape(program.mesh, whole.shape), dtype=whole.dtype, device=whole.device)
        values[node.name] = fake.requires_grad_(whole.requires_grad)
    return values


class _Run:
    def __init__(
        self, mesh: Mesh, segments: Sequence[Segment], replays: Sequence[Replay], values: dict[Name, Tensor]
    ) -> None:
        self._mesh = mesh
        self._segments = segments
        self._replays = replays
        self._values = values
        self._given = _Storages(values.values())
        self._on_host = {name for segment in segments if segment.on_host for name in segment.writes}
        self._on_host |= {c.result for s in segments for c in s.crossings if c.collective.kind == "to_host"}
        self._kept = _Storages()

    def forward(self) -> int:
        """Return the bytes that are kept after the forward pass."""
        given = dict(self._values)
        for index, segment in enumerate(self._segments):
            replay = None if segment.region is None else self._replays[segment.region]
            self._segment(segment, self._kept if replay is None and not segment.on_host else _Storages(), replay)
            for crossing in segment.crossings:
                self._values[crossing.result] = self._cross(crossing)
            if replay is not None and index == replay.last:
                for name in replay.dropped:
                    self._values.pop(name, None)
        for name, value in self._values.items():
            if name not in given and name not in self._on_host:
                self._kept.add(value)
        return self._kept.bytes_beside(self._given)

    def again(self) -> int:
        """Return the bytes that the greatest region takes beside those, when it runs again."""
        most = 0
        for replay in self._replays:
            before = dict(self._values)
            found = _Storages()
            for index in replay.steps:
                if index in replay.segments:
                    on_host = self._segments[index].on_host
                    self._segment(self._segments[index], _Storages() if on_host else found, None)
                for crossing in replay.crossings.get(index, []):
                    self._values[crossing.result] = self._cross(crossing)
                    if crossing.result not in self._on_host:
                        found.add(self._values[crossing.result])
            most = max(most, found.bytes_beside(self._given, self._kept))
            self._values = before
        return most

    def _segment(self, segment: Segment, saved: _Storages, replay: Replay | None) -> None:
        if segment.is_empty:
            return
        inputs = [self._values[name] for name in segment.reads]
        with saved.saving():
            if replay is not None and replay.save is not None:
                written = _Keeping(segment.module, replay.save, self._kept).run(*inputs)
            else:
                written = segment.module(*inputs)
        for name, value in zip(segment.writes, written, strict=True):
            saved.add(value)
            self._values.setdefault(name, value.detach().requires_grad_(value.requires_grad))

    def _cross(self, crossing: Crossing) -> Tensor:
        """Return a tensor like the result of a collective."""
        value = self._values[crossing.source]
        if crossing.takes_source:
            return value.detach().requires_grad_(value.requires_grad)
        return cross_on_fakes(value, crossing.collective, self._mesh)


class _Keeping(fx.Interpreter):
    """Runs a segment and notes the results of the operators that the user wants kept."""

    def __init__(self, module: fx.GraphModule, policy: SavePolicy, kept: _Storages) -> None:
        super().__init__(module)
        self._policy = policy
        self._kept_results = kept

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and self._policy(n.target):
            for value in result if isinstance(result, tuple | list) else (result,):
                self._kept_results.add(value)
        return result
