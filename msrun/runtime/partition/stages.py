"""Stages: the local program cut into the parts that the ranks of a pipeline run.

A value that later stages read crosses every border on the way, in the layout that it has. What changes its layout for
a reader belongs to the reader's stage, so no border carries more than the value itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from msrun.runtime.partition.local_values import LocalValue, gradient_reaches
from msrun.runtime.partition.program import ORIGIN, LocalProgram
from msrun.runtime.sharding.operators.rule import apply_collective


@dataclass(frozen=True)
class BorderValue:
    """A value that crosses the border between two neighbouring stages."""

    name: str
    """Of its node in the local graph."""
    value: LocalValue
    has_gradient: bool
    """Whether a gradient comes back for it."""


@dataclass(frozen=True)
class StageProgram:
    """What one stage computes."""

    index: int
    program: LocalProgram
    """Its inputs are the user's tensors that it reads, then the values that it reads of those it receives."""
    user_inputs: tuple[int, ...]
    """Indexes of the user's tensors that it reads."""
    reads: tuple[BorderValue, ...]
    """Received values that it reads; the others it only passes on."""
    received: tuple[BorderValue, ...]
    """From the stage before, in order."""
    sent: tuple[BorderValue, ...]
    """To the next stage, in order."""
    results: Mapping[int, str]
    """index of a result of the network -> its name, for those that this stage makes"""
    made: tuple[str, ...]
    """Names of the program's results, as other stages and the network know them: a copy has another one."""


def cut_stages(
    program: LocalProgram,
    stage_of: Mapping[fx.Node, int],
    count: int,
    values: Mapping[fx.Node, LocalValue],
    loss: fx.Node | None,
) -> list[StageProgram]:
    """Cut a local program.

    Args:
        stage_of: captured operator -> stage.
        values: what every value of the local program is.
        loss: the result that gradients start from; None when there is none.
    """
    local = _local_stages(program, stage_of)
    with_gradient = gradient_reaches([loss] if loss is not None else [], values)
    borders = [_border(program, local, index, values, with_gradient) for index in range(count - 1)]
    around: list[tuple[BorderValue, ...]] = [(), *borders, ()]
    return [_cut(program, local, index, around[index], around[index + 1]) for index in range(count)]


def holders_of(program: LocalProgram, stages: Sequence[StageProgram]) -> dict[str, tuple[int, ...]]:
    """Return parameter name -> the stages that read it, ascending; none of them reads one that the graph leaves out."""
    return {name: tuple(s.index for s in stages if name in s.program.parameters) for name in program.parameters}


def _local_stages(program: LocalProgram, stage_of: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Return the stage of every local operator: its captured operator's; the readers' for a change of layout."""
    local: dict[fx.Node, int] = {}
    moves: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        source = next(iter(node.all_input_nodes), None)
        if ORIGIN not in node.meta:  # lays a result out as the user wants it
            local[node] = local.get(source, 0) if source is not None else 0
            continue
        local[node] = stage_of[node.meta[ORIGIN]]
        if node.target is not apply_collective or source is None:
            continue
        if source in moves or source.meta.get(ORIGIN) is not node.meta[ORIGIN]:
            moves.add(node)
    for node in reversed(program.graph.nodes):
        if node in moves:
            local[node] = min((local[user] for user in node.users if user in local), default=local[node])
    return local


def _border(
    program: LocalProgram,
    local: Mapping[fx.Node, int],
    before: int,
    values: Mapping[fx.Node, LocalValue],
    with_gradient: set[fx.Node],
) -> tuple[BorderValue, ...]:
    """Return what travels from stage `before` to the next one."""
    crossing = []
    for node in program.graph.nodes:
        if local.get(node, before + 1) <= before and any(local.get(user, 0) > before for user in node.users):
            value = values[node]
            crossing.append(BorderValue(node.name, value, node in with_gradient))
    return tuple(crossing)


def _cut(
    program: LocalProgram,
    local: Mapping[fx.Node, int],
    index: int,
    received: tuple[BorderValue, ...],
    sent: tuple[BorderValue, ...],
) -> StageProgram:
    own = [node for node in program.graph.nodes if local.get(node) == index]
    results = _results(program, local, index)
    needed = dict.fromkeys(n for node in own for n in node.all_input_nodes if local.get(n) != index)
    needed |= dict.fromkeys(node for node in results.values() if node not in local)
    graph = fx.Graph()
    copied = {node: graph.placeholder(node.name) for node in needed}
    for node in own:
        copied[node] = graph.node_copy(node, lambda n: copied[n])
    made = [node for node in own if node.name in {value.name for value in sent}]
    outputs = list(dict.fromkeys([*made, *results.values()]))
    graph.output(tuple(copied[node] for node in outputs))
    user_inputs = tuple(i for i, node in enumerate(program.inputs) if node in needed)
    reads = tuple(value for value in received if value.name in {node.name for node in needed})
    by_name = {node.name: node for node in needed}
    inputs = [*(program.inputs[i] for i in user_inputs), *(by_name[value.name] for value in reads)]
    cut = replace(
        program,
        graph=graph,
        parameters={
            name: replace(use, node=copied[use.node]) for name, use in program.parameters.items() if use.node in needed
        },
        buffers={name: copied[node] for name, node in program.buffers.items() if node in needed},
        constants={
            copied[node].name: (copied[node], value) for node, value in program.constants.values() if node in needed
        },
        inputs=[copied[node] for node in inputs],
        input_layouts=[],
        outputs=[copied[node] for node in outputs],
    )
    named, names = {i: node.name for i, node in results.items()}, tuple(node.name for node in outputs)
    return StageProgram(index, cut, user_inputs, reads, received, sent, named, names)


def _results(program: LocalProgram, local: Mapping[fx.Node, int], index: int) -> dict[int, fx.Node]:
    """Return the network's results that a stage makes; the first stage returns what nobody makes."""
    return {
        number: node
        for number, node in enumerate(program.outputs)
        if isinstance(node, fx.Node) and local.get(node, 0) == index
    }
