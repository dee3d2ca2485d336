"""Stages: the local program cut into the parts that the ranks of a pipeline run.

A value that later stages read crosses every border on the way, in the layout that it has. What changes its layout for
a reader belongs to the reader's stage, so no border carries more than the value itself.
"""

from __future__ import annotations

import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from torch import Tensor, fx

from msrun.errors import StrategyError
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.cost.operators import operations
from msrun.runtime.partition.events import LocalValue, gradient_reaches
from msrun.runtime.partition.program import ORIGIN, LocalProgram
from msrun.runtime.sharding.operators.rule import apply_collective, operator_call

OPERATIONS_PER_BYTE = 8.0
"""Operations that count as much as one byte of a parameter: what its gather, reduction and update cost in a step, and
its memory. It matters for embeddings and other large tables that compute little."""
SLACK = 1.1
"""A stage may cost this much more than the most expensive one of the best division, where less data travels then."""


@dataclass(frozen=True)
class StageAssignment:
    """The stage of every operator."""

    stage_of: Mapping[fx.Node, int]
    costs: tuple[float, ...]
    """Cost of every stage, in operations."""
    reason: str
    """Who decided: the user's modules, parameters placed before, or equal cost."""

    @property
    def by_name(self) -> dict[str, int]:
        """The stage of every operator, by a name that a later capture of the same network gives it too."""
        return {name: self.stage_of[node] for node, name in _names(self.stage_of).items()}


Pins = Mapping[fx.Node, Sequence[int]]
"""operator -> stages that it may be in, ascending"""


def assign_stages(
    captured: CapturedGraph, count: int, pins: Pins, reason: str, earlier: Mapping[str, int] | None = None
) -> StageAssignment:
    """Assign every operator to one of `count` stages.

    Args:
        pins: operators whose stage is known; empty divides the graph into stages of equal cost.
        reason: who pinned them.
        earlier: the stages of an earlier capture of the network, by name: operators that are not pinned stay there.
    """
    operators = [node for node in captured.graph.nodes if node.op == "call_function"]
    if not pins:
        pins, reason = _equal_cost(captured, operators, count), "equal cost"
    stage_of = _flow(operators, pins, earlier or {})
    costs = [0.0] * count
    for node, cost in _costs(captured, operators).items():
        costs[stage_of[node]] += cost
    empty = sorted(set(range(count)) - set(stage_of.values()))
    if empty:
        raise StrategyError(
            f"stage {empty[0]} of {count} has no operator: name a module for every stage in stage_config, or use fewer "
            "stages"
        )
    return StageAssignment(stage_of, tuple(costs), reason)


def _names(operators: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Name every operator by its module, what it computes, and how many of that came before it there."""
    counts: Counter[str] = Counter()
    names = {}
    for node in operators:
        kind = f"{operator_call(node).module_path} {node.target}"
        names[node] = f"{kind} {counts[kind]}"
        counts[kind] += 1
    return names


def _flow(operators: Sequence[fx.Node], pins: Pins, earlier: Mapping[str, int]) -> dict[fx.Node, int]:
    """Let operators that are not pinned stay where they were, or follow what they read, else what reads them.

    None stays behind a pinned one that needs it.
    """
    stage_of: dict[fx.Node, int] = {}
    names = _names(operators) if earlier else {}
    latest: dict[fx.Node, int] = {}
    for node in reversed(operators) if earlier else ():
        bounds = [latest[user] for user in node.users if user in latest]
        latest[node] = min([*bounds, pins[node][-1]] if node in pins else bounds, default=sys.maxsize)
    for node in operators:
        sources = [n for n in node.all_input_nodes if n in stage_of]
        least = max((stage_of[n] for n in sources), default=None)
        before = min(earlier.get(names.get(node, ""), -1), latest.get(node, -1))
        if node in pins and not _is_item(node):
            stage_of[node] = _pinned(node, pins[node], least, sources, stage_of, before)
        elif least is not None:
            stage_of[node] = max(least, before)
    for node in reversed(operators):
        if node not in stage_of:
            stage_of[node] = min((stage_of[user] for user in node.users if user in stage_of), default=0)
    for node in operators:  # after those whose readers have decided: an item may be read later than the first one
        if _is_item(node):
            stage_of[node] = stage_of[node.all_input_nodes[0]]
    return stage_of


def _is_item(node: fx.Node) -> bool:
    """Return whether a node takes one of several results: they are a list, which stays where it is made."""
    return node.target is operator.getitem


def _pinned(
    node: fx.Node,
    allowed: Sequence[int],
    least: int | None,
    sources: Sequence[fx.Node],
    stage_of: Mapping[fx.Node, int],
    before: int,
) -> int:
    fitting = [stage for stage in allowed if least is None or stage >= least]
    if fitting:
        return before if before in fitting else fitting[0]
    source = next(n for n in sources if stage_of[n] == least)
    raise StrategyError(
        f"{_path(node)} is in stage {allowed[-1]} but reads what {_path(source)} in stage {least} makes: "
        f"data goes from lower to higher stages only, so give it stage {least} or a later one"
    )


def _path(node: fx.Node) -> str:
    """Return the module that calls an operator, in the user's words."""
    path = re.sub(r"^(network(\.|$))+", "", operator_call(node).module_path)
    return f"module {path}" if path else f"operator {str(node.target).removesuffix('.default')}"


def _costs(captured: CapturedGraph, operators: Sequence[fx.Node]) -> dict[fx.Node, float]:
    """Return the cost of every operator; a parameter counts where it is read first."""
    counted: set[fx.Node] = set()
    costs = {}
    for node in operators:
        cost = _operations(node)
        for source in node.all_input_nodes:
            if source.name in captured.parameters and source not in counted:
                counted.add(source)
                value = source.meta["val"]
                cost += OPERATIONS_PER_BYTE * value.numel() * value.element_size()
        costs[node] = cost
    return costs


def _operations(node: fx.Node) -> float:
    """Return the operations of one operator on global shapes: only their proportions matter here."""
    value = node.meta.get("val")
    results = [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, Tensor)]
    if not results or _is_item(node):
        return 0.0
    return operations(node.target, operator_call(node).shapes, sum(each.numel() for each in results))


# -- equal cost ------------------------------------------------------------------------------------------------------


def _equal_cost(captured: CapturedGraph, operators: Sequence[fx.Node], count: int) -> dict[fx.Node, list[int]]:
    """Pin every operator that depends on a parameter: in graph order, cut where stages cost alike."""
    trained = _depend_on(operators, lambda n: n.name in captured.parameters)
    line = [node for node in operators if node in trained and not _is_item(node)]
    if len(line) < count:
        raise StrategyError(
            f"{len(line)} operators of the network depend on parameters, too few for {count} stages: use fewer stages"
        )
    costs = _costs(captured, operators)
    begins = divide([costs[node] for node in line], _bytes_before(line), count)
    stages = [sum(begin <= position for begin in begins) for position in range(len(line))]
    return {node: [stage] for node, stage in zip(line, stages, strict=True)}


def _depend_on(operators: Sequence[fx.Node], is_source: Callable[[fx.Node], bool]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in operators:
        if any(n in found or is_source(n) for n in node.all_input_nodes):
            found.add(node)
    return found


def _bytes_before(line: Sequence[fx.Node]) -> list[int]:
    """Return for every operator how many bytes would travel if a stage began with it."""
    place = {node: index for index, node in enumerate(line)}
    change = [0] * (len(line) + 1)
    for node, index in place.items():
        for result in [node, *filter(_is_item, node.users)]:
            value = result.meta.get("val")
            last = max((place[user] for user in result.users if user in place), default=index)
            if isinstance(value, Tensor) and last > index:
                change[index + 1] += value.numel() * value.element_size()
                change[last + 1] -= value.numel() * value.element_size()
    return list(accumulate(change))[: len(line)]


def divide(costs: Sequence[float], traffic: Sequence[float], count: int) -> list[int]:
    """Cut a line of operators into `count` parts: the most expensive part as cheap as can be, then with least traffic.

    Args:
        costs: of every operator.
        traffic: what travels when a part begins with that operator.

    Returns:
        Where the second and further parts begin. Every part has at least one operator, and none costs more than SLACK
        times the most expensive part of the best division.
    """
    sums = [0.0, *accumulate(costs)]
    limit = _least_limit(sums, count) * SLACK
    total = len(costs)
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for part in range(1, count + 1):
        row: dict[int, tuple[float, int]] = {}
        for end in range(part, total - (count - part) + 1):
            for begin in range(end - 1, part - 2, -1):
                if sums[end] - sums[begin] > limit:
                    break
                if begin in best[-1]:
                    travels = best[-1][begin][0] + (traffic[begin] if begin else 0)
                    if end not in row or travels < row[end][0]:
                        row[end] = (travels, begin)
        best.append(row)
    begins = []
    end = total
    for row in reversed(best[1:]):
        end = row[end][1]
        begins.append(end)
    return sorted(begins)[1:]


def _least_limit(sums: Sequence[float], count: int) -> float:
    """Return, nearly, the cost of the most expensive part of the best division into `count` parts, and never less."""
    costs = [after - before for before, after in pairwise(sums)]
    low, high = max(max(costs), sums[-1] / count), sums[-1]
    for _ in range(50):
        middle = (low + high) / 2
        if _parts_needed(costs, middle) <= count:
            high = middle
        else:
            low = middle
    return high


def _parts_needed(costs: Sequence[float], limit: float) -> int:
    parts, held = 1, 0.0
    for cost in costs:
        if held + cost > limit:
            parts, held = parts + 1, 0.0
        held += cost
    return parts


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
    _check_buffers(program, local)
    with_gradient = gradient_reaches([loss] if loss is not None else [], values)
    borders = [_border(program, local, index, values, with_gradient) for index in range(count - 1)]
    around: list[tuple[BorderValue, ...]] = [(), *borders, ()]
    return [_cut(program, local, index, around[index], around[index + 1]) for index in range(count)]


def _check_buffers(program: LocalProgram, local: Mapping[fx.Node, int]) -> None:
    """Refuse a buffer that one stage changes and another one reads, or whose new value is no result of an operator."""
    for name, buffer in program.buffers.items():
        if buffer not in program.buffer_updates:
            continue
        value = program.buffer_updates[buffer]
        if value not in local:
            raise StrategyError(
                f"the network sets buffer {name} to an input as it is, which belongs to no stage of the pipeline: "
                "compute its value, or use GradAccumulation instead of Pipeline"
            )
        if len({local[user] for user in buffer.users if user in local} | {local[value]}) > 1:
            raise StrategyError(
                f"the network changes buffer {name} in its forward pass, and several stages of the pipeline "
                "use it: put its modules into one stage (stage_config), or use GradAccumulation instead of Pipeline"
            )


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
        origin = node.meta.get(ORIGIN)
        if origin is None:  # lays a result out as the user wants it
            local[node] = local.get(node.all_input_nodes[0], 0)
            continue
        local[node] = stage_of[origin]
        if node.target is apply_collective:
            (source,) = node.all_input_nodes
            if source in moves or source.meta.get(ORIGIN) is not origin:
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
    updates = {buffer: value for buffer, value in program.buffer_updates.items() if local[value] == index}
    needed = dict.fromkeys(n for node in own for n in node.all_input_nodes if local.get(n) != index)
    needed |= dict.fromkeys(node for node in [*results.values(), *updates] if node not in local)
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
        buffer_updates={copied[buffer]: copied[value] for buffer, value in updates.items()},
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
