"""Decide: which strategy every operator of a captured graph gets, and how every value comes to where it is read.

Operator by operator: find its strategy, lay its inputs out as the strategy needs (redistribution), let inputs that
several parts of the work share enter (their gradients are partial sums). What only a whole walk can tell (sums that
all readers cut alike, parameters that are better stored for a later use) is known to the next walk, until nothing is
left to improve. Nothing is lowered: no local graph, no rank, no process group.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from msrun.runtime.capture.assignment import (
    LayoutConstraint,
    follows_region,
    layout_constraint,
    strategy_of,
)
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.nn.random_draws import FACTORIES
from msrun.runtime.partition.events import has_gradient
from msrun.runtime.partition.program import Decisions, OperatorDecision, Read, Use, refuse_redistributions
from msrun.runtime.partition.reads import (
    ParameterUses,
    Reads,
    describe_operator,
    layout_of_result,
    layouts_of_outputs,
    scatter_of,
)
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout
from msrun.runtime.sharding.operators.registry import REPLICATED, find_rule
from msrun.runtime.sharding.operators.rule import Form, LabelSplit, Rule, operator_call, summed_axes
from msrun.runtime.sharding.strategies import choose_split


@dataclass(frozen=True)
class Constraints:
    """What is given before anything is decided."""

    input_layouts: Sequence[TensorLayout]
    """How the user's tensors arrive."""
    splits: Mapping[str, LabelSplit] = field(default_factory=dict)
    """captured operator -> the axes that cut its labels, as a search or a file has them"""
    output_batch_axes: Axes = ()
    """Axes that cut the rows of the batch in results; () gives them whole."""
    differentiable_inputs: frozenset[int] = frozenset()
    """Indexes of the user's tensors whose gradient is wanted."""
    stored: Mapping[str, TensorLayout] = field(default_factory=dict)
    """parameter -> layout in which it is stored already"""
    is_strict: bool = False
    """Traffic between layouts that nobody asked for is refused."""


@dataclass(frozen=True)
class _Known:
    """What earlier walks have found out."""

    scatters: dict[str, tuple[int, Axes]] = field(default_factory=dict)
    """captured operator -> dimension and axes by which all readers of its sum cut it"""
    draws: dict[str, tuple[int, Axes]] = field(default_factory=dict)
    """captured random numbers, made of nothing -> dimension and axes by which all their readers cut them"""
    storage: dict[str, Use] = field(default_factory=dict)
    """parameter that is read in several ways -> how it is stored"""


@dataclass(frozen=True)
class _Value:
    layout: TensorLayout
    summed: Axes = ()
    """Axes over which an all-reduce made it whole that could be a reduce-scatter."""


def decide(captured: CapturedGraph, mesh: Mesh, constraints: Constraints) -> Decisions:
    """Return the decisions for one call of a network."""
    known = [_Known()]
    while True:
        walk = _Walk(captured, mesh, constraints, known[-1])
        decisions = walk.run()
        found = walk.find_out()
        # Scatters and draws only grow. How a parameter is stored may go back and forth, as each way makes the other
        # look better; every walk's decisions are right, so the last one's are taken then.
        if found in known:
            break
        known.append(found)
    if constraints.is_strict:
        refuse_redistributions(decisions.redistributions)
    return decisions


def gives_tensors(node: fx.Node) -> bool:
    """Return whether an operator gives a list of tensors."""
    value = node.meta.get("val")
    return isinstance(value, list | tuple) and all(isinstance(result, torch.Tensor) for result in value)


def is_whole_operator(node: fx.Node, rule: Rule | None) -> bool:
    """Return whether every rank computes all of an operator: it has several results or none, and no rule."""
    return not isinstance(node.meta.get("val"), torch.Tensor) and (rule is None or not gives_tensors(node))


class _Walk:
    """One walk over the captured graph."""

    def __init__(self, captured: CapturedGraph, mesh: Mesh, given: Constraints, known: _Known) -> None:
        self._captured = captured
        self._mesh = mesh
        self._given = given
        self._known = known
        self._differentiable: set[fx.Node] = set()
        """captured nodes that a gradient flows to"""
        self._reads = Reads(mesh, self._differentiable)
        self._parameters = ParameterUses(self._reads, mesh, captured.assignment, given.stored, known.storage)
        self._values: dict[fx.Node, _Value] = {}
        """captured node that is no parameter -> where its value is"""
        self._decisions = Decisions(mesh, list(given.input_layouts), given.differentiable_inputs)

    def run(self) -> Decisions:
        """Walk the captured graph once."""
        for node in self._captured.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._decisions.operators[node.name] = self._operator(node)
        decisions = self._decisions
        decisions.output_layouts = layouts_of_outputs(self._captured, self._mesh, self._given.output_batch_axes)
        decisions.outputs = [
            value if layout is None else self._input(value, layout, (), by="results", reader="the results", asked=True)
            for value, layout in zip(self._captured.outputs, decisions.output_layouts, strict=True)
        ]
        for name, value in self._captured.buffer_updates.items():
            whole = TensorLayout.replicated(value.meta["val"].dim())
            decisions.buffer_updates[name] = self._input(value, whole, (), by=name, reader=f"buffer {name}", asked=True)
        decisions.parameters = self._parameters.finished()
        decisions.placeholders = self._parameters.placeholders
        decisions.redistributions = self._reads.redistributions
        decisions.notes += self._captured.assignment.notes
        return decisions

    def find_out(self) -> _Known:
        """Return what the next walk should know; equal to what this one knew when nothing is left to improve."""
        known, scatters, draws = self._known, {}, {}
        for node, value in self._values.items():
            cut = self._reads.cut_by_all_readers(node, value.layout)
            if cut is None:
                continue
            if value.summed and node.name not in known.scatters and (found := scatter_of(cut, value.summed)):
                scatters[node.name] = found
            if node.target in FACTORIES:
                draws[node.name] = cut.dim, cut.axes
        storage = known.storage | self._parameters.better_storage()
        return _Known(known.scatters | scatters, draws | known.draws, storage)

    # -- inputs -------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        value = node.meta["val"]
        if node.name in self._captured.parameters:
            self._parameters.add(node, self._captured.parameters[node.name])
            if value.requires_grad:
                self._differentiable.add(node)
        elif node.name in self._captured.buffers or node.name in self._captured.constants:
            self._values[node] = _Value(TensorLayout.replicated(value.dim()))
        else:
            index = self._captured.inputs.index(node.name)
            if index in self._given.differentiable_inputs:
                self._differentiable.add(node)
            self._values[node] = _Value(self._given.input_layouts[index])

    def _layout_of(self, node: fx.Node) -> TensorLayout | None:
        """Return a value's layout; None for a parameter whose layout its first use will decide."""
        if node in self._values:
            return self._values[node].layout
        return self._parameters.layout_of(node)

    def _input(
        self, node: fx.Node, target: TensorLayout, entered: Axes, *, by: object, reader: str = "", asked: bool = False
    ) -> Read:
        entered = entered if node in self._differentiable else ()
        if node not in self._values:
            return self._parameters.read(node, Use(target, entered), by=by, reader=reader)
        self._reads.hold(node, self._values[node].layout)
        return self._reads.bring(node, target, entered, by=by, reader=reader, asked=asked)

    # -- operators ----------------------------------------------------------------------------------------------

    def _operator(self, node: fx.Node) -> OperatorDecision:
        if node.target is operator.getitem:
            return self._item(node)
        mark = layout_constraint(node)
        if mark is not None:
            return self._lay_out(node, mark)
        rule = find_rule(node.target)
        if is_whole_operator(node, rule):
            return self._whole_operator(node)
        return self._with_rule(node, rule or REPLICATED)

    def _with_rule(self, node: fx.Node, rule: Rule) -> OperatorDecision:
        call = operator_call(node)
        form = rule.form(call)
        strategy = strategy_of(node)
        layouts = [self._layout_of(tensor) for tensor in call.tensors]
        follows = follows_region(node)
        searched = self._given.splits.get(node.name)
        if searched is not None:
            split, origin = searched, "user" if strategy is not None else "searched"
        else:
            split, origin = choose_split(call, rule, form, self._mesh, strategy, layouts, follows=follows)
        if node.name in self._known.draws:
            dim, axes = self._known.draws[node.name]
            split = {str(form.output[dim]): axes}
        scatter = self._known.scatters.get(node.name)
        after = _split_of_result(form, split, scatter)
        reads = []
        for index, tensor in enumerate(call.tensors):
            own = after if index in form.added else split
            target, entered = form.layout_of_input(index, own, self._mesh), form.entered(index, own)
            reads.append(self._input(tensor, target, entered, by=node, reader=describe_operator(node)))
        value = node.meta["val"]
        if self._differentiable & set(call.tensors) and (
            not isinstance(value, torch.Tensor) or has_gradient(value.dtype)
        ):
            self._differentiable.add(node)
        summed = summed_axes(form, split) if rule.scatters else ()
        of_results = (form.layout(form.output, after), *(form.layout(labels, split) for labels in form.others))
        self._values[node] = _Value(of_results[0], summed)
        return OperatorDecision(tuple(reads), of_results, split, origin, scatter)

    def _lay_out(self, node: fx.Node, constraint: LayoutConstraint) -> OperatorDecision:
        """Give a value the layout that the user wants where it enters or leaves a region."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        held, shape = self._values[source], tuple(node.meta["val"].shape)
        layout = layout_of_result(constraint, shape, self._mesh, held.layout, held.summed)
        read = self._input(source, layout, (), by=node, asked=True)
        if source in self._differentiable:
            self._differentiable.add(node)
        self._values[node] = _Value(layout)
        self._parameters.mark(node.name, layout)
        return OperatorDecision((read,), (layout,), origin="user")

    def _whole_operator(self, node: fx.Node) -> OperatorDecision:
        """An operator with several results, or none: every rank computes the whole."""
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        reads = [
            self._input(n, TensorLayout.replicated(n.meta["val"].dim()), (), by=node, reader=str(node.target))
            for n in tensors
        ]
        self._values[node] = _Value(TensorLayout(()))
        if self._differentiable & set(tensors):
            self._differentiable.add(node)
        return OperatorDecision(tuple(reads), (), origin="no rule")

    def _item(self, node: fx.Node) -> OperatorDecision:
        """Take one result of an operator with several; of one without a rule, all are whole."""
        (source, index), value = node.args, node.meta["val"]
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        if source in self._differentiable and has_gradient(value.dtype):
            self._differentiable.add(node)
        layouts = self._decisions.operators[source.name].layouts
        layout = layouts[index] if layouts else TensorLayout.replicated(value.dim())
        self._values[node] = _Value(layout)
        return OperatorDecision((), (layout,))


def _split_of_result(form: Form, split: LabelSplit, scatter: tuple[int, Axes] | None) -> LabelSplit:
    """Return the split with the axes by which a sum is left cut added to its dimension of the output."""
    if scatter is None:
        return split
    dim, axes = scatter
    label = form.output[dim]
    assert label is not None
    return {**split, label: (*split.get(label, ()), *axes)}
