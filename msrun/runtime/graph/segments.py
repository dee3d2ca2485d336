"""Segments: the local program cut at its collectives, so that copies can take turns and gradients leave early.

Every node has a level: one more than the level of a collective that it waits for. Segment k holds the operators of
level k; the collectives of level k start when it has been computed and are waited for by the first segment that reads
them. Reading a fusion group of parameters for the first time begins a level too: then gathers are waited for one group
at a time on the way forward, and on the way back a group's gradient leaves as soon as its segment is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx, nn

from msrun.runtime.graph.collectives import Collective
from msrun.runtime.graph.operators.rule import apply_collective
from msrun.runtime.graph.partition import LocalProgram

Name = str
"""Name of a value: that of its node in the local graph."""


@dataclass(frozen=True)
class Crossing:
    """A collective between segments: reads one value, makes another."""

    source: Name
    result: Name
    collective: Collective


@dataclass
class Segment:
    """The operators of one level."""

    module: fx.GraphModule
    reads: list[Name]
    writes: list[Name]
    """Values that later segments, collectives or the caller read."""
    crossings: list[Crossing] = field(default_factory=list)
    """Collectives that start when this segment has been computed."""
    groups: list[int] = field(default_factory=list)
    """Fusion groups of parameters that this segment reads."""
    new_groups: list[int] = field(default_factory=list)
    """Those that no earlier segment reads."""

    @property
    def is_empty(self) -> bool:
        """True when only collectives happen at this level."""
        return not self.writes


def cut_segments(program: LocalProgram, group_of: Mapping[Name, int]) -> list[Segment]:
    """Cut a program.

    Args:
        group_of: placeholder name of a parameter -> its fusion group.
    """
    levels = _levels(program.graph, group_of)
    count = 1 + max(levels.values(), default=0)
    kept = _read_later(program, levels)
    seen: set[int] = set()
    segments = []
    for level in range(count):
        nodes = [n for n in program.graph.nodes if levels.get(n) == level and n.op == "call_function"]
        segment = _segment([n for n in nodes if not _is_collective(n)], kept)
        read = {n.name for node in nodes for n in node.all_input_nodes}
        segment.groups = sorted({group_of[name] for name in read if name in group_of})
        segment.new_groups = [group for group in segment.groups if group not in seen]
        seen |= set(segment.groups)
        for node in nodes:
            if _is_collective(node):
                source = node.args[0]
                assert isinstance(source, fx.Node)
                segment.crossings.append(Crossing(source.name, node.name, _collective(node)))
        segments.append(segment)
    return segments


def _is_collective(node: fx.Node) -> bool:
    return node.target is apply_collective


def _collective(node: fx.Node) -> Collective:
    return cast(Collective, node.kwargs["collective"])


def _levels(graph: fx.Graph, group_of: Mapping[Name, int]) -> dict[fx.Node, int]:
    levels: dict[fx.Node, int] = {}
    group_levels: dict[int, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            levels[node] = 0
        elif node.op == "call_function":
            level = max((levels[n] + _is_collective(n) for n in node.all_input_nodes), default=0)
            for group in sorted({group_of[n.name] for n in node.all_input_nodes if n.name in group_of}):
                if group not in group_levels:
                    newest = max(group_levels.values(), default=-1)
                    group_levels[group] = max(level, newest + 1)
                level = max(level, group_levels[group])
            levels[node] = level
    return levels


def _read_later(program: LocalProgram, levels: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Return the nodes whose value leaves their segment."""
    kept = {node for node in program.outputs if isinstance(node, fx.Node)}
    for node in program.graph.nodes:
        if node.op == "call_function":
            kept |= {n for n in node.all_input_nodes if _is_collective(node) or levels[n] != levels[node]}
    return kept


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
    for node in nodes:
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    writes = [node for node in nodes if node in kept]
    graph.output(tuple(mapping[node] for node in writes))
    module = fx.GraphModule(nn.Module(), graph)
    return Segment(module, [n.name for n in reads], [n.name for n in writes])


def render_segments(segments: list[Segment]) -> str:
    """Return the whole local program as text: operators, and every collective where it starts."""
    lines: list[str] = []
    for number, segment in enumerate(segments):
        lines.append(f"segment {number}: reads {', '.join(segment.reads) or 'nothing'}")
        for node in segment.module.graph.nodes:
            if node.op == "call_function":
                lines.append(f"    {node.name} = {node.target}({_arguments(node)})")
        lines += [f"    {c.result} = {c.collective} of {c.source}" for c in segment.crossings]
    return "\n".join(lines)


def _arguments(node: fx.Node) -> str:
    def text(value: Any) -> str:
        return str(value)

    return ", ".join([*map(text, node.args), *(f"{k}={text(v)}" for k, v in node.kwargs.items())])
