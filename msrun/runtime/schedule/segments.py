"""Segments: the local program cut at its collectives, so that copies can be interleaved and gradients leave early.

Every node has a level: one more than the level of a collective that it waits for. Segment k holds the operators of
level k; the collectives of level k start when it has been computed and are waited for by the first segment that reads
them. Reading a fusion group of parameters for the first time begins a level too: then gathers are waited for one group
at a time on the way forward, and on the way back a group's gradient leaves as soon as its segment is done.

Operators of the host have segments of their own: they run beside the device's of the same level, for no value goes from
the one to the other without a copy, and copies are collectives here.

Sums over the ranks that need nothing but the program's inputs, as the number of targets that count in a mean loss, come
first: they leave before anything is computed, and are waited for only by what stands after the next level. So do copies
of inputs between the memories of host and device, so that both sides begin at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn

from msrun.runtime.partition.program import ON_HOST, LocalProgram
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.operators.rule import PLACE, apply_collective
from msrun.runtime.sharding.sizes import FreeNumber, SizesOfCall

aten = torch.ops.aten
_PRODUCTS = frozenset({aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default})
"""Results and gradients of factors are new memory each, and autograd keeps factors only."""


def may_take_source(node: fx.Node, collective: Collective, kept: Set[fx.Node]) -> bool:
    """Return whether a collective may write to what it reads.

    Args:
        node: the collective.
        kept: values that somebody beside the graph's operators reads.
    """
    source = node.args[0]
    return (
        collective.kind == "all_reduce"
        and isinstance(source, fx.Node)
        and source.target in _PRODUCTS
        and list(source.users) == [node]
        and source not in kept
    )


def may_take_gradient(node: fx.Node, collective: Collective, kept: Set[fx.Node]) -> bool:
    """Return whether a collective's way back may write to the gradient of its result."""
    return (
        collective.kind == "enter"
        and bool(node.users)
        and all(user.target in _PRODUCTS and node in user.args[:2] for user in node.users)
        and node not in kept
    )


@dataclass(frozen=True)
class BufferUpdate:
    """One buffer gets a new value."""

    buffer: Name
    """Its placeholder."""
    value: Name


@dataclass(frozen=True)
class BufferPlan:
    """What an executor does about buffers."""

    updates: Mapping[int, Sequence[BufferUpdate]]
    """segment -> what is written when a copy has run it"""
    spans: Sequence[range]
    """All segments in order, in the groups that a copy runs without a break."""

    @property
    def written(self) -> list[Name]:
        """Placeholders of the buffers that change."""
        return [update.buffer for updates in self.updates.values() for update in updates]


def plan_buffers(program: LocalProgram, segments: Sequence[Segment]) -> BufferPlan:
    """Return when every changed buffer is written, and the spans."""
    updates: dict[int, list[BufferUpdate]] = {}
    bound: set[int] = set()
    for placeholder, value in program.buffer_updates.items():
        reads = [i for i, segment in enumerate(segments) if placeholder.name in _read_names(segment)]
        last = _available(value, segments)
        updates.setdefault(last, []).append(BufferUpdate(placeholder.name, value.name))
        bound |= set(range(min([*reads, last]), last))
    spans: list[range] = []
    start = 0
    for index in range(len(segments)):
        if index not in bound:  # not bound to the next one
            spans.append(range(start, index + 1))
            start = index + 1
    return BufferPlan(updates, spans)


def _read_names(segment: Segment) -> set[Name]:
    return {*segment.reads, *(crossing.source for crossing in segment.crossings)}


def _available(value: fx.Node, segments: Sequence[Segment]) -> int:
    """Return the first segment after which a value is there: collectives arrive one segment after their start."""
    for index, segment in enumerate(segments):
        if value.name in segment.writes:
            return index
        if any(crossing.result == value.name for crossing in segment.crossings):
            return min(index + 1, len(segments) - 1)
    return 0  # an input of the program


Name = str
"""Name of a value: that of its node in the local graph."""


class _Place(NamedTuple):
    """Where a node stands."""

    level: int
    region: int | None = None
    """Recomputed."""
    on_host: bool = False

    @property
    def order(self) -> tuple[int, int, bool]:
        """Of segments: the host's before the device's, so that it has begun while the device computes."""
        return self.level, -1 if self.region is None else self.region, not self.on_host


@dataclass(frozen=True)
class Crossing:
    """A collective between segments: reads one value, makes another."""

    source: Name
    result: Name
    collective: Collective
    region: int | None = None
    """Recomputed region that it belongs to."""
    takes_source: bool = False
    """Whether it may write to its source."""
    takes_gradient: bool = False
    """Whether its way back may write to the gradient of its result."""


@dataclass
class Segment:
    """The operators of one level; of one recomputed region, where there are some."""

    module: fx.GraphModule
    reads: list[Name]
    writes: list[Name]
    """Values that later segments, collectives or the caller read."""
    crossings: list[Crossing] = field(default_factory=list)
    """Collectives that start when this segment has been computed."""
    groups: list[int] = field(default_factory=list)
    """Fusion groups of parameters that this segment reads, by themselves or through a view of them."""
    new_groups: list[int] = field(default_factory=list)
    """Those that no earlier segment reads."""
    region: int | None = None
    """Recomputed region that all its operators belong to."""
    level: int = 0
    on_host: bool = False
    """Whether its operators run on the host, beside those of the device of its level."""
    free: dict[str, FreeNumber] = field(default_factory=dict)
    """attribute of the module -> what it is in calls of other sizes"""
    run: Callable[..., Any] = field(init=False)
    """What computes it: its module, or that compiled."""

    def __post_init__(self) -> None:
        self.run = self.module

    def use(self, sizes: SizesOfCall) -> None:
        """Compute for a call of these sizes from now on."""
        vars(self.module).update({name: number.at(sizes) for name, number in self.free.items()})

    @property
    def is_empty(self) -> bool:
        """True when only collectives happen at this level."""
        return not self.writes


def cut_segments(
    program: LocalProgram,
    group_of: Mapping[Name, int],
    region_of: Mapping[Name, int] | None = None,
    memory_of: Mapping[Name, Name] | None = None,
) -> list[Segment]:
    """Cut a program.

    Args:
        group_of: placeholder name of a parameter -> its fusion group.
        region_of: name of a node -> the recomputed region that it belongs to; a segment never holds nodes of two.
        memory_of: value -> the parameter whose memory it is: who reads the one needs the other.
    """
    region_of, memory_of = region_of or {}, memory_of or {}
    places = _places(program.graph, group_of, region_of, _early(program, region_of))
    kept = _read_later(program, places)
    results = _results(program)
    count = 1 + max((place.level for place in places.values()), default=0)
    inside: dict[_Place, list[fx.Node]] = {_Place(level): [] for level in range(count)}
    for node in program.graph.nodes:
        if node.op == "call_function":
            inside.setdefault(places[node], []).append(node)
    seen: set[int] = set()
    segments = []
    for place in sorted(inside, key=lambda p: p.order):
        nodes = inside[place]
        segment = _segment([n for n in nodes if not _is_collective(n)], kept)
        read = {memory_of.get(n.name, n.name) for node in nodes for n in node.all_input_nodes}
        segment.groups = sorted({group_of[name] for name in read if name in group_of})
        segment.level, segment.region, segment.on_host = place
        segment.new_groups = [group for group in segment.groups if group not in seen]
        seen |= set(segment.groups)
        for node in nodes:
            if _is_collective(node):
                segment.crossings.append(_crossing(node, region_of, results))
        segments.append(segment)
    return segments


def _crossing(node: fx.Node, region_of: Mapping[Name, int], results: Set[fx.Node]) -> Crossing:
    source, collective = node.args[0], _collective(node)
    assert isinstance(source, fx.Node)
    is_again = not region_of.keys().isdisjoint({source.name, node.name, *(user.name for user in node.users)})
    return Crossing(
        source.name,
        node.name,
        collective,
        region_of.get(node.name),
        takes_source=not is_again and may_take_source(node, collective, results),
        takes_gradient=not is_again and may_take_gradient(node, collective, results),
    )


def _is_collective(node: fx.Node) -> bool:
    return node.target is apply_collective


def _collective(node: fx.Node) -> Collective:
    return cast(Collective, node.kwargs["collective"])


def _early(program: LocalProgram, region_of: Mapping[Name, int]) -> set[fx.Node]:
    """Return the sums over ranks that need inputs alone, and copies of inputs, with all that they are computed from."""
    given = {*program.inputs, *program.buffers.values(), *(node for node, _ in program.constants.values())}
    ready = given - set(program.buffer_updates)
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            ready |= {node} if node.name == PLACE else set()
        elif node.op == "call_function" and node.name not in region_of and ready.issuperset(node.all_input_nodes):
            if not _is_collective(node) or _collective(node).is_local:
                ready.add(node)
            elif _collective(node).kind == "all_reduce" or (
                _collective(node).is_copy and all(map(_is_collective, _computed_from(node)))
            ):
                found |= {node, *_computed_from(node)}
    return found


def _computed_from(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        sources = {n for n in waiting.pop().all_input_nodes if n.op == "call_function"} - found
        found |= sources
        waiting += sources
    return found


def _places(
    graph: fx.Graph, group_of: Mapping[Name, int], region_of: Mapping[Name, int], early: Set[fx.Node]
) -> dict[fx.Node, _Place]:
    """Return the level and region of every node; a collective stands where its source was computed."""
    places: dict[fx.Node, _Place] = {node: _Place(0) for node in graph.nodes if node.op == "placeholder"}
    for node in graph.nodes:
        if node in early:
            places[node] = _earliest(node, places, region_of)
    first = 1 + max((places[node].level for node in early), default=-1)
    group_levels: dict[bool, dict[int, int]] = {True: {}, False: {}}
    for node in graph.nodes:
        if node.op != "call_function" or node in early:
            continue
        level, region, on_host = _earliest(node, places, region_of)
        levels = group_levels[on_host]
        if any(n in early and _moves(n) and not _collective(n).is_copy for n in node.all_input_nodes):
            level = max(level, first + 1)
        elif not _is_collective(node) or node.all_input_nodes[0].op != "placeholder":
            level = max(level, first)
        for group in sorted({group_of[n.name] for n in node.all_input_nodes if n.name in group_of}):
            if group not in levels:
                newest = max(levels.values(), default=-1)
                levels[group] = max(level, newest + 1)
            level = max(level, levels[group])
        places[node] = _Place(level, region, on_host)
    return places


def _earliest(node: fx.Node, places: Mapping[fx.Node, _Place], region_of: Mapping[Name, int]) -> _Place:
    """Return where a node may stand, for what it reads."""
    if _is_collective(node) and not _is_collective(node.all_input_nodes[0]):
        return places[node.all_input_nodes[0]]
    region = region_of.get(node.name)
    waits = [places[n].level + _begins_level(n, region, region_of) for n in node.all_input_nodes]
    return _Place(max(waits, default=0), region, not _is_collective(node) and node.meta.get(ON_HOST, False))


def _moves(node: fx.Node) -> bool:
    return _is_collective(node) and not _collective(node).is_local


def _begins_level(read: fx.Node, region: int | None, region_of: Mapping[Name, int]) -> bool:
    """Return True when a reader of `read` must stand on a later level: one that waits, or lies in another region."""
    return _is_collective(read) or (read.op == "call_function" and region_of.get(read.name) != region)


def _read_later(program: LocalProgram, places: Mapping[fx.Node, _Place]) -> set[fx.Node]:
    """Return the nodes whose value leaves their segment."""
    kept = _results(program)
    for node in program.graph.nodes:
        if node.op == "call_function":
            kept |= {n for n in node.all_input_nodes if _is_collective(node) or places[n] != places[node]}
    return kept


def _results(program: LocalProgram) -> set[fx.Node]:
    """Return what the caller reads."""
    return {node for node in program.outputs if isinstance(node, fx.Node)} | set(program.buffer_updates.values())


def _segment(nodes: list[fx.Node], kept: set[fx.Node]) -> Segment:
    graph = fx.Graph()
    inside = set(nodes)
    mapping: dict[fx.Node, fx.Node] = {}
    reads: list[fx.Node] = []
    for node in nodes:
        for read in node.all_input_nodes:
            if read not in inside and read not in mapping:
                mapping[read] = graph.placeholder(read.name)
                reads.append(read)
    free: dict[str, FreeNumber] = {}
    root = nn.Module()

    def argument(value: Any) -> Any:
        if not isinstance(value, FreeNumber):
            return mapping[value] if isinstance(value, fx.Node) else value
        name = next((name for name, other in free.items() if other.expression == value.expression), f"size_{len(free)}")
        if name not in free:
            free[name] = value
            setattr(root, name, value)
        return graph.get_attr(name)

    for node in nodes:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), argument)
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        mapping[node].args, mapping[node].kwargs = args, kwargs
    writes = [node for node in nodes if node in kept]
    graph.output(tuple(mapping[node] for node in writes))
    module = fx.GraphModule(root, graph)
    return Segment(module, [n.name for n in reads], [n.name for n in writes], free=free)


def render_segment(number: int, segment: Segment, note: str = "") -> list[str]:
    """Return a segment as lines of text: its operators, and the collectives that start after them."""
    where = " on the host" if segment.on_host else ""
    lines = [f"segment {number}{where}: reads {', '.join(segment.reads) or 'nothing'}{note}"]
    for node in segment.module.graph.nodes:
        if node.op == "call_function":
            lines.append(f"    {node.name} = {_operator(node)}({_arguments(node)})")
    return [*lines, *(f"    {c.result} = {c.collective} of {c.source}" for c in segment.crossings)]


def _operator(node: fx.Node) -> str:
    """Return an operator's name, equal in every process."""
    is_function = not isinstance(node.target, torch._ops.OpOverload) and hasattr(node.target, "__name__")
    return str(node.target.__name__) if is_function else str(node.target)  # type: ignore[union-attr]


def _arguments(node: fx.Node) -> str:
    def text(value: Any) -> str:
        return str(value)

    return ", ".join([*map(text, node.args), *(f"{k}={text(v)}" for k, v in node.kwargs.items())])
