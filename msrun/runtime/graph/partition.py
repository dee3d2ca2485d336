"""Partition: the captured graph becomes the local program of this rank, with every collective in plain sight.

Operator by operator: find its strategy, lay its inputs out as the strategy needs (redistribution), let inputs that
several parts of the work share enter (their gradients are partial sums), compute the local part, make partial sums
whole. The result is plain local tensors and collectives; no layout is looked at when the program runs.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.graph.assignment import WantedLayout, follows_region, strategy_of, wanted_layout
from msrun.runtime.graph.decisions import Decisions, find_cut_draws, find_scatters
from msrun.runtime.graph.moves import Moves, describe_operator, refuse_lists
from msrun.runtime.graph.operators.registry import REPLICATED, find_rule
from msrun.runtime.graph.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    apply_collective,
    operator_call,
    summed_axes,
)
from msrun.runtime.graph.parameter_uses import ParameterUses, Use
from msrun.runtime.graph.program import MODULE_PATH as MODULE_PATH
from msrun.runtime.graph.program import ORIGIN as ORIGIN
from msrun.runtime.graph.program import LocalProgram as LocalProgram
from msrun.runtime.graph.program import OperatorPlan as OperatorPlan
from msrun.runtime.graph.program import ParameterUse as ParameterUse
from msrun.runtime.graph.strategies import OperatorStrategy, choose_split
from msrun.runtime.graph.strictness import refuse_redistributions
from msrun.runtime.graph.wanted import layout_of_result
from msrun.runtime.layout import Axes, Mesh, TensorLayout
from msrun.runtime.nn.random_draws import FACTORIES


@dataclass(frozen=True)
class _Value:
    node: fx.Node
    layout: TensorLayout
    summed: Axes = ()
    """Axes over which an all-reduce made it whole that could be a reduce-scatter."""


def partition(
    captured: CapturedGraph,
    mesh: Mesh,
    *,
    input_layouts: Sequence[TensorLayout],
    strategies: Mapping[str, OperatorStrategy],
    output_batch_axes: Axes,
    differentiable_inputs: frozenset[int] = frozenset(),
    stored: Mapping[str, TensorLayout] | None = None,
    is_strict: bool = False,
) -> LocalProgram:
    """Return the local program.

    Args:
        input_layouts: how the user's tensors arrive.
        strategies: module path -> strategy, for operators without one of their own.
        output_batch_axes: axes that cut dimension 0 of results that are not scalars; () gives them whole.
        differentiable_inputs: indexes of the user's tensors whose gradient is wanted.
        stored: parameter name -> layout in which it is stored already.
        is_strict: refuse traffic between layouts that nobody asked for.

    Raises:
        StrategyError: an illegal strategy, or with `is_strict` a redistribution.
    """
    decisions = Decisions()
    while True:
        walk = _Partition(
            captured,
            mesh,
            input_layouts,
            strategies,
            output_batch_axes,
            differentiable_inputs,
            stored=stored or {},
            decisions=decisions,
        )
        program = walk.run()
        found = walk.next_decisions()
        if found == decisions:
            break
        decisions = found
    if is_strict:
        refuse_redistributions(program.redistributions)
    return program


def _gives_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, list | tuple) and all(isinstance(result, torch.Tensor) for result in value)


class _Partition:
    def __init__(
        self,
        captured: CapturedGraph,
        mesh: Mesh,
        input_layouts: Sequence[TensorLayout],
        strategies: Mapping[str, OperatorStrategy],
        output_batch_axes: Axes,
        differentiable_inputs: frozenset[int],
        *,
        stored: Mapping[str, TensorLayout],
        decisions: Decisions,
    ) -> None:
        self._differentiable_inputs = differentiable_inputs
        self._differentiable: set[fx.Node] = set()
        """captured nodes that a gradient flows to"""
        self._captured = captured
        self._mesh = mesh
        self._input_layouts = list(input_layouts)
        self._strategies = strategies
        self._used_strategies: set[str] = set()
        calls = [n for n in captured.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        self._operators_of = Counter(operator_call(node).module_path for node in calls)
        self._batch_axes = output_batch_axes
        self._graph = fx.Graph()
        self._build = LocalBuilder(self._graph, mesh)
        self._moves = Moves(self._build, self._differentiable)
        self._parameters = ParameterUses(self._moves, mesh, captured.assignment, stored, decisions.storage)
        self._values: dict[fx.Node, _Value] = {}
        """captured node that is no parameter -> its local value"""
        self._decisions = decisions
        self._others: dict[fx.Node, tuple[TensorLayout, ...]] = {}
        """captured node -> layouts of its second and further results"""
        self._sums: dict[str, tuple[fx.Node, Axes]] = {}
        """captured operator -> its local result and the axes over which that was summed"""
        self._draws: dict[str, fx.Node] = {}
        """captured random numbers, made of nothing -> their local ones"""
        self._program = LocalProgram(self._graph, mesh, {}, {}, {}, [], self._input_layouts, [], [])

    def run(self) -> LocalProgram:
        """Walk the captured graph once."""
        for node in self._captured.graph.nodes:
            newest = next(reversed(self._graph.nodes), None)
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._operator(node)
            self._stamp(node, newest)
        before = len(self._graph.nodes)
        self._program.outputs = [
            self._output(value, is_whole=index in self._captured.stored)
            for index, value in enumerate(self._captured.outputs)
        ]
        self._buffer_updates()
        self._program.collectives.append(self._collectives_since(before))
        self._graph.output(tuple(self._program.outputs))
        self._program.parameters = self._parameters.finished()
        self._program.redistributions = self._moves.redistributions
        self._program.differentiable_inputs = self._differentiable_inputs
        unused = sorted(set(self._strategies) - self._used_strategies)
        if unused:
            self._program.notes.append(f"strategies of modules that the graph does not call: {', '.join(unused)}")
        self._program.notes += self._captured.assignment.notes
        return self._program

    # -- inputs -------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        local = self._graph.placeholder(node.name)
        value = local.meta["val"] = node.meta["val"]
        if node.name in self._captured.parameters:
            self._parameters.add(node, self._captured.parameters[node.name], local)
            if value.requires_grad:
                self._differentiable.add(node)
        elif node.name in self._captured.buffers:
            self._program.buffers[self._captured.buffers[node.name]] = local
            self._values[node] = _Value(local, TensorLayout.replicated(value.dim()))
        elif node.name in self._captured.constants:
            constant = self._captured.constants[node.name]
            self._program.constants[node.name] = (local, constant)
            self._values[node] = _Value(local, TensorLayout.replicated(constant.dim()))
        else:
            index = self._captured.inputs.index(node.name)
            self._program.inputs.append(local)
            if index in self._differentiable_inputs:
                self._differentiable.add(node)
            self._values[node] = _Value(local, self._input_layouts[index])

    def _stamp(self, captured: fx.Node, before: fx.Node | None) -> None:
        """Write on the local nodes after `before` what they were made for."""
        for made in itertools.takewhile(partial(operator.is_not, before), reversed(self._graph.nodes)):
            made.meta[ORIGIN] = captured
            if made.op == "call_function":
                made.meta[MODULE_PATH] = operator_call(captured).module_path

    # -- operators ----------------------------------------------------------------------------------------------

    def _operator(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._item(node)
            return
        mark = wanted_layout(node)
        if mark is not None:
            self._lay_out(node, mark)
            return
        refuse_lists(node)
        rule = find_rule(node.target)
        if not isinstance(node.meta.get("val"), torch.Tensor) and (rule is None or not _gives_tensors(node)):
            self._whole_operator(node)
            return
        rule = rule or REPLICATED
        call = operator_call(node)
        form = rule.form(call)
        path = call.module_path
        is_followed = rule.follows and len(call.tensors) == 1 and self._operators_of[path] > 1
        takes_strategy = bool(call.tensors) and not is_followed
        strategy = strategy_of(node) or (self._strategies.get(path) if takes_strategy else None)
        split, origin = choose_split(
            call,
            rule,
            form,
            self._mesh,
            strategy,
            [self._layout_of(tensor) for tensor in call.tensors],
            follows=follows_region(node),
        )
        if node.name in self._decisions.draws:
            dim, axes = self._decisions.draws[node.name]
            split = {str(form.output[dim]): axes}
        if origin == "user":
            self._used_strategies.add(path)
        before = len(self._graph.nodes)
        after = self._split_of_result(node, form, split)
        inputs = []
        for index, (tensor, labels) in enumerate(zip(call.tensors, form.inputs, strict=True)):
            own = after if index in form.added else split
            wanted, entered = form.layout(labels, own), form.entered(index, own)
            inputs.append(self._input(tensor, wanted, entered, reader=describe_operator(node)))
        self._build.scatter = self._decisions.scatters.get(node.name)
        result = rule.lower(call, form, self._build, inputs, split)
        self._build.scatter = None
        value = node.meta["val"]
        if self._differentiable & set(call.tensors) and (
            not isinstance(value, torch.Tensor) or value.is_floating_point()
        ):
            self._differentiable.add(node)
        if node.target in FACTORIES:
            self._draws[node.name] = result
        summed = summed_axes(form, split) if rule.scatters else ()
        self._values[node] = _Value(result, form.layout(form.output, after), summed)
        if summed:
            self._sums[node.name] = result, summed
        self._others[node] = tuple(form.layout(labels, split) for labels in form.others)
        self._record(call, rule, form, split, origin, before)

    def _split_of_result(self, node: fx.Node, form: Form, split: LabelSplit) -> LabelSplit:
        """Return the split with the axes by which a sum is left cut added to its dimension of the output."""
        if node.name not in self._decisions.scatters:
            return split
        dim, axes = self._decisions.scatters[node.name]
        label = form.output[dim]
        assert label is not None
        return {**split, label: (*split.get(label, ()), *axes)}

    def _lay_out(self, node: fx.Node, wanted: WantedLayout) -> None:
        """Give a value the layout that the user wants where it enters or leaves a region."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        held, shape = self._values[source], tuple(node.meta["val"].shape)
        layout = layout_of_result(wanted, shape, self._mesh, held.layout, held.summed)
        before = len(self._graph.nodes)
        local = self._input(source, layout, (), asked=True)
        if source in self._differentiable:
            self._differentiable.add(node)
        self._values[node] = _Value(local, layout)
        self._parameters.mark(node.name, layout)
        kind = "out_strategy" if wanted.leaves else "in_strategy"
        moved = self._collectives_since(before)
        self._program.collectives.append(moved)
        self._program.operators.append(
            OperatorPlan(node.name, kind, wanted.name, (layout.numbers(self._mesh),), "user", _texts(moved))
        )

    def _whole_operator(self, node: fx.Node) -> None:
        """An operator with several results, or none: every rank computes the whole."""
        values = {
            tensor: self._input(tensor, TensorLayout.replicated(tensor.meta["val"].dim()), (), reader=str(node.target))
            for tensor in node.all_input_nodes
            if isinstance(tensor.meta.get("val"), torch.Tensor)
        }
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: values[n] if n in values else self._values[n].node
        )
        assert callable(node.target)
        self._values[node] = _Value(self._graph.call_function(node.target, args, kwargs), TensorLayout(()))
        if self._differentiable & set(values):
            self._differentiable.add(node)
        self._note_replicated(str(node.target))

    def _item(self, node: fx.Node) -> None:
        """Take one result of an operator with several; of one without a rule, all are whole."""
        (source, index), value = node.args, node.meta["val"]
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        packed = self._build.packed.get(self._values[source].node, {})
        if packed and index not in packed:  # its rule leaves out what nobody reads
            return
        local = (
            packed[index] if packed else self._graph.call_function(operator.getitem, (self._values[source].node, index))
        )
        if source in self._differentiable and value.is_floating_point():
            self._differentiable.add(node)
        layouts = (self._values[source].layout, *self._others[source]) if source in self._others else ()
        self._values[node] = _Value(local, layouts[index] if layouts else TensorLayout.replicated(value.dim()))

    def _layout_of(self, node: fx.Node) -> TensorLayout | None:
        """Return a value's layout; None for a parameter whose layout its first use will decide."""
        if node in self._values:
            return self._values[node].layout
        return self._parameters.layout_of(node)

    def _input(
        self, node: fx.Node, wanted: TensorLayout, entered: Axes, *, reader: str = "", asked: bool = False
    ) -> fx.Node:
        entered = entered if node in self._differentiable else ()
        if node not in self._values:
            return self._parameters.read(node, Use(wanted, entered), reader)
        self._moves.hold(node, self._values[node].node, self._values[node].layout)
        return self._moves.bring(node, wanted, entered, reader=reader, asked=asked)

    def next_decisions(self) -> Decisions:
        """Return what the next walk should know; equal to this walk's decisions when nothing is left to improve."""
        known = self._decisions
        scatters = known.scatters | {
            n: found for n, found in find_scatters(self._sums).items() if n not in known.scatters
        }
        draws = find_cut_draws(self._draws) | known.draws
        return Decisions(scatters, draws, known.storage | self._parameters.better_storage())

    # -- results ------------------------------------------------------------------------------------------------

    def _output(self, value: Any, *, is_whole: bool) -> Any:
        if not isinstance(value, fx.Node):
            return value
        shape = tuple(value.meta["val"].shape)
        wanted = TensorLayout.replicated(len(shape))
        if not is_whole and shape and shape[0] % self._mesh.extent(self._batch_axes) == 0:
            wanted = TensorLayout((self._batch_axes, *((),) * (len(shape) - 1)))
        return self._result(value, wanted, "the results")

    def _result(self, value: fx.Node, wanted: TensorLayout, reader: str) -> fx.Node:
        """Return a value that outlives the program: of a parameter a copy, as its own memory may be given back."""
        local = self._input(value, wanted, (), reader=reader, asked=True)
        is_parameter = value.name in self._captured.parameters and local.op == "placeholder"
        return self._build.call(torch.ops.aten.clone.default, local) if is_parameter else local

    def _buffer_updates(self) -> None:
        for name, value in self._captured.buffer_updates.items():
            wanted = TensorLayout.replicated(value.meta["val"].dim())
            self._program.buffer_updates[self._program.buffers[name]] = self._result(value, wanted, f"buffer {name}")

    def _collectives_since(self, count: int) -> list[fx.Node]:
        return [node for node in list(self._graph.nodes)[count:] if node.target is apply_collective]

    def _record(self, call: OperatorCall, rule: Rule, form: Form, split: LabelSplit, origin: str, before: int) -> None:
        added = self._collectives_since(before)
        self._program.collectives.append(added)
        self._program.operators.append(
            OperatorPlan(
                name=call.node.name,
                operator=call.operator.removesuffix(".default"),
                module_path=call.module_path,
                strategy=tuple(form.layout(labels, split).numbers(self._mesh) for labels in form.inputs),
                origin=origin,
                collectives=_texts(added),
                repeats=self._mesh.size // math.prod(self._mesh.extent(axes) for axes in split.values()),
            )
        )
        if rule is REPLICATED and call.tensors:
            self._note_replicated(str(call.node.target))

    def _note_replicated(self, operator: str) -> None:
        note = f"{operator} has no rule: every rank computes all of it"
        if note not in self._program.notes:
            self._program.notes.append(note)


def _texts(collectives: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(str(node.kwargs["collective"]) for node in collectives)
