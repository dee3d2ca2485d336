"""Assignment: which captured operator a strategy of a region means.

A region with one operator that takes a strategy (matmul, linear, ...) gives it to that operator, whose inputs may be
parameters too: MindSpore's `Primitive.shard`. In a region with several, or with a parameter plan, the strategy lays
out what enters and what leaves, and the operators keep what their inputs and parameters bring: MindSpore's `shard` of
a cell or function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from msrun.errors import StrategyError
from msrun.runtime.capture.marked_calls import Mark, MarkedCall, read_region_mark
from msrun.runtime.sharding.operators.registry import find_rule
from msrun.runtime.sharding.operators.rule import STRATEGY, operator_call
from msrun.runtime.sharding.strategies import Entry, OperatorStrategy

FOLLOWS, LAYOUT = "msrun_follows", "msrun_layout"
"""Keys of a captured node's meta: that it follows its inputs; the layout that a mark is for."""


@dataclass(frozen=True)
class LayoutConstraint:
    """A layout that the user asks for at one place of the graph."""

    entry: Entry
    name: str
    """Of the region: the module's path, or the function's name."""
    leaves: bool
    """True for an out_strategy, False for an in_strategy."""


@dataclass
class Assignment:
    """What the strategies of all regions come to, beside what is written on the nodes."""

    parameters: dict[str, tuple[Entry, tuple[str, ...]]] = field(default_factory=dict)
    """parameter name -> how it is stored, and the marks (names of nodes) whose axes it leaves alone"""
    notes: list[str] = field(default_factory=list)


def strategy_of(node: fx.Node) -> OperatorStrategy | None:
    """Return the user's strategy for a captured operator."""
    return node.meta.get(STRATEGY)


def follows_region(node: fx.Node) -> bool:
    """Return True for an operator that keeps what its inputs bring, because its region was laid out."""
    return FOLLOWS in node.meta


def layout_constraint(node: fx.Node) -> LayoutConstraint | None:
    """Return the layout that a captured mark stands for."""
    return node.meta.get(LAYOUT)


def assign_strategies(
    graph: fx.Graph, regions: Sequence[MarkedCall], parameter_of: Mapping[str, str], root: nn.Module
) -> Assignment:
    """Write every strategy on the operators and marks that it means, and take the other marks out.

    Args:
        parameter_of: placeholder name -> parameter name.
    """
    assignment = Assignment()
    inside, has_inner = _operators_of_regions(graph, len(regions))
    marks: list[dict[Mark, fx.Node]] = [{} for _ in regions]
    for node in graph.nodes:
        mark = read_region_mark(node)
        if mark is not None:
            marks[mark.number][mark] = node
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for number, region in enumerate(regions):
        if not marks[number]:
            assignment.notes.append(f"strategy of {region.name}: nothing of it is left in the graph")
            continue
        is_of_attention = region.strategy.named is not None and not region.strategy.named.weight
        mains = _attentions(inside[number]) if is_of_attention else _candidates(inside[number])
        if (is_of_attention or not has_inner[number]) and _is_meant_for_one(region, mains):
            mains[0].meta[STRATEGY] = region.strategy
        else:
            _check_region(region, mains)
            _lay_out(region, marks[number], inside[number])
            kept = tuple(node.name for mark, node in marks[number].items() if not mark.leaves)
            for parameter, entry in region.strategy.parameters:
                if id(parameter) not in names:
                    shape = tuple(parameter.shape)
                    raise StrategyError(
                        f"parameter_plan of {region.name}: its parameter of shape {shape} is none of the network's; "
                        "let the function use modules that the network holds"
                    )
                assignment.parameters[names[id(parameter)]] = entry, kept
        _lay_out_results(region, marks[number])
    for node in [node for of_region in marks for node in of_region.values()]:
        _settle_mark(node, parameter_of, assignment)
    return assignment


def _operators_of_regions(graph: fx.Graph, count: int) -> tuple[list[list[fx.Node]], list[bool]]:
    """Return the operators that stand in each region and in no region inside it, and whether there is such a one."""
    marks = {node: mark.number for node in graph.nodes if (mark := read_region_mark(node)) is not None}
    last = {region: node for node, region in marks.items()}
    inside: list[list[fx.Node]] = [[] for _ in range(count)]
    has_inner = [False] * count
    seen: set[int] = set()
    around: list[int] = []
    for node in graph.nodes:
        region = marks.get(node)
        if region is None:
            if around and node.op == "call_function":
                inside[around[-1]].append(node)
            continue
        if region not in seen:
            seen.add(region)
            for outer in around:
                has_inner[outer] = True
            around.append(region)
        if node is last[region]:
            around.remove(region)
    return inside, has_inner


def _candidates(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the operators that a strategy may mean: matrix products and the like before those that only follow."""
    computing = [node for node in nodes if isinstance(node.meta.get("val"), torch.Tensor | tuple | list)]
    ruled = [(node, find_rule(node.target), len(operator_call(node).tensors)) for node in computing]
    classes = [
        [node for node, rule, count in ruled if count and rule is not None and not rule.follows],
        [node for node, rule, count in ruled if count > 1 and rule is not None],
        [node for node, rule, count in ruled if count > 1 and rule is None],
        [node for node, _, count in ruled if count],
    ]
    return next((found for found in classes if found), [])


def _attentions(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the operators that a word about an attention's sequence may mean."""
    return [node for node in nodes if node.target is torch.ops.aten.scaled_dot_product_attention.default]


def _is_meant_for_one(region: MarkedCall, mains: Sequence[fx.Node]) -> bool:
    strategy = region.strategy
    if strategy.named is not None:
        return len(mains) == 1
    if len(mains) != 1 or strategy.parameters or not strategy.inputs:
        return False
    return len(strategy.inputs) <= len(operator_call(mains[0]).tensors)


def _check_region(region: MarkedCall, mains: Sequence[fx.Node]) -> None:
    given = len(region.strategy.inputs)
    if region.strategy.named is not None and not region.strategy.named.weight:
        raise StrategyError(
            f"plan: {region.name} is to attend by {region.strategy.named.side}, but it calls scaled_dot_product_"
            f"attention {len(mains)} times itself; name the module that does so once, and give a model of transformers "
            'attn_implementation="sdpa"'
        )
    if region.strategy.named is not None:
        raise StrategyError(
            f"plan: {region.name} is to be cut {region.strategy.named.side}, but it calls {len(mains)} operators that "
            "could be; name the layers inside it"
        )
    if given in (0, region.inputs):
        return
    calls = ", ".join(f"{str(n.target).removesuffix('.default')} in {_path(n)}" for n in mains) or "no operator"
    raise StrategyError(
        f"strategy of {region.name} has {given} tuples for its {region.inputs} tensor inputs, and it calls {calls}: "
        "give one tuple for each tensor that it is called with, and lay its parameters out with parameter_plan; or "
        "shard the modules inside it one by one"
    )


def _path(node: fx.Node) -> str:
    return operator_call(node).module_path or "(top)"


def _lay_out(region: MarkedCall, marks: Mapping[Mark, fx.Node], operators: Sequence[fx.Node]) -> None:
    for node in operators:
        node.meta[FOLLOWS] = True
    for mark, node in marks.items():
        entry = region.strategy.inputs[mark.index] if mark.index < len(region.strategy.inputs) else None
        if entry is not None and not mark.leaves:
            node.meta[LAYOUT] = LayoutConstraint(entry, region.name, leaves=False)


def _lay_out_results(region: MarkedCall, marks: Mapping[Mark, fx.Node]) -> None:
    outputs = region.strategy.outputs
    if outputs and len(outputs) != region.outputs:
        raise StrategyError(
            f"out_strategy of {region.name} has {len(outputs)} tuples for its {region.outputs} results; "
            "give one for each"
        )
    for mark, node in marks.items():
        entry = outputs[mark.index] if mark.leaves and outputs else None
        if entry is not None:
            node.meta[LAYOUT] = LayoutConstraint(entry, region.name, leaves=True)


def _settle_mark(node: fx.Node, parameter_of: Mapping[str, str], assignment: Assignment) -> None:
    """Take out a mark that lays nothing out, or that stands for a parameter: that one is stored as it says."""
    constraint, source = layout_constraint(node), node.args[0]
    assert isinstance(source, fx.Node)
    if constraint is not None and source.name in parameter_of:
        assignment.parameters.setdefault(parameter_of[source.name], (constraint.entry, ()))
    elif constraint is not None:
        return
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)
