"""Partition: the captured graph becomes the local program of this rank, with every collective in plain sight.

Operator by operator: find its strategy, lay its inputs out as the strategy needs (redistribution), let inputs that
several parts of the work share enter (their gradients are partial sums), compute the local part, make partial sums
whole. The result is plain local tensors and collectives; no layout is looked at when the program runs.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from msrun.errors import StrategyError
from msrun.runtime.graph.capture import CapturedGraph
from msrun.runtime.graph.collectives import Collective
from msrun.runtime.graph.operators.registry import REPLICATED, find_rule
from msrun.runtime.graph.operators.rule import Form, LabelSplit, LocalBuilder, OperatorCall, Rule, operator_call
from msrun.runtime.graph.strategies import OperatorStrategy, choose_split
from msrun.runtime.layout import Axes, Mesh, TensorLayout, plan_redistribution


@dataclass
class ParameterUse:
    """How the graph uses one parameter."""

    name: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    layout: TensorLayout
    """Layout at its use, before optimizer parallel cuts it further."""
    partial_axes: Axes
    """Axes along which this rank's gradient is a partial sum."""
    node: fx.Node
    """Its placeholder in the local graph; gets the part that `layout` says."""


@dataclass(frozen=True)
class OperatorPlan:
    """What was decided for one operator: for the plan's explanation."""

    name: str
    operator: str
    module_path: str
    strategy: tuple[tuple[int, ...], ...]
    """MindSpore's tuples: parts per dimension, per input."""
    origin: str
    """user, follows, data parallel, or no rule."""
    collectives: tuple[str, ...]
    """What was inserted for it."""


@dataclass
class LocalProgram:
    """The program of every rank: the same graph, each with its own parts."""

    graph: fx.Graph
    mesh: Mesh
    parameters: dict[str, ParameterUse]
    buffers: dict[str, fx.Node]
    """name -> placeholder; buffers are whole on every rank"""
    constants: dict[str, tuple[fx.Node, torch.Tensor]]
    inputs: list[fx.Node]
    input_layouts: list[TensorLayout]
    outputs: list[Any]
    """fx nodes or plain values"""
    operators: list[OperatorPlan]
    notes: list[str] = field(default_factory=list)
    buffer_updates: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """placeholder of a buffer -> its whole value after the forward pass"""


@dataclass(frozen=True)
class _Value:
    node: fx.Node
    layout: TensorLayout


def partition(
    captured: CapturedGraph,
    mesh: Mesh,
    *,
    input_layouts: Sequence[TensorLayout],
    strategies: Mapping[str, OperatorStrategy],
    output_batch_axes: Axes,
    differentiable_inputs: frozenset[int] = frozenset(),
) -> LocalProgram:
    """Return the local program.

    Args:
        input_layouts: how the user's tensors arrive.
        strategies: module path -> the user's strategy.
        output_batch_axes: axes that cut dimension 0 of results that are not scalars; () gives them whole.
        differentiable_inputs: indexes of the user's tensors whose gradient is wanted.

    Raises:
        StrategyError: an illegal strategy, or one parameter wanted in two layouts.
    """
    return _Partition(captured, mesh, input_layouts, strategies, output_batch_axes, differentiable_inputs).run()


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
        self._values: dict[fx.Node, _Value] = {}
        self._parameters: dict[fx.Node, ParameterUse | None] = {}
        self._others: dict[fx.Node, tuple[TensorLayout, ...]] = {}
        """captured node -> layouts of its second and further results"""
        self._moved: dict[tuple[fx.Node, str], fx.Node] = {}
        """(local node, moves) -> result: two readers of one value share its redistribution"""
        self._program = LocalProgram(self._graph, mesh, {}, {}, {}, [], self._input_layouts, [], [])

    def run(self) -> LocalProgram:
        """Walk the captured graph once."""
        for node in self._captured.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._operator(node)
        self._program.outputs = [self._output(value) for value in self._captured.outputs]
        self._buffer_updates()
        self._graph.output(tuple(self._program.outputs))
        self._finish_parameters()
        unused = sorted(set(self._strategies) - self._used_strategies)
        if unused:
            self._program.notes.append(f"strategies of modules that the graph does not call: {', '.join(unused)}")
        return self._program

    # -- inputs -------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        local = self._graph.placeholder(node.name)
        value = node.meta["val"]
        if node.name in self._captured.parameters:
            self._parameters[node] = None
            self._differentiable.add(node)
            self._values[node] = _Value(local, TensorLayout.replicated(value.dim()))
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

    def _finish_parameters(self) -> None:
        for node, use in self._parameters.items():
            value = node.meta["val"]
            if use is None:  # never read by an operator with a rule of its own
                layout = TensorLayout.replicated(value.dim())
                use = ParameterUse("", tuple(value.shape), value.dtype, layout, (), self._values[node].node)
            use.name = self._captured.parameters[node.name]
            self._program.parameters[use.name] = use

    # -- operators ----------------------------------------------------------------------------------------------

    def _operator(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._item(node)
            return
        rule = find_rule(node.target)
        if not isinstance(node.meta.get("val"), torch.Tensor) and (rule is None or not _gives_tensors(node)):
            self._whole_operator(node)
            return
        rule = rule or REPLICATED
        call = operator_call(node)
        form = rule.form(call)
        path = call.module_path
        takes_strategy = not rule.follows or len(call.tensors) > 1 or self._operators_of[path] == 1
        strategy = self._strategies.get(path) if takes_strategy else None
        split, origin = choose_split(
            call, rule, form, self._mesh, strategy, [self._layout_of(tensor) for tensor in call.tensors]
        )
        if origin == "user":
            self._used_strategies.add(path)
        before = len(self._graph.nodes)
        inputs = [
            self._input(tensor, labels_layout, form.entered(index, split))
            for index, (tensor, labels_layout) in enumerate(
                zip(call.tensors, (form.layout(labels, split) for labels in form.inputs), strict=True)
            )
        ]
        result = rule.lower(call, form, self._build, inputs, split)
        if self._differentiable & set(call.tensors) and (form.others or node.meta["val"].is_floating_point()):
            self._differentiable.add(node)
        self._values[node] = _Value(result, form.layout(form.output, split))
        self._others[node] = tuple(form.layout(labels, split) for labels in form.others)
        self._record(call, rule, form, split, origin, before)

    def _whole_operator(self, node: fx.Node) -> None:
        """An operator with several results, or none: every rank computes the whole."""
        values = {
            tensor: self._input(tensor, TensorLayout.replicated(tensor.meta["val"].dim()), ())
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
        local = (
            packed[index] if packed else self._graph.call_function(operator.getitem, (self._values[source].node, index))
        )
        if source in self._differentiable and value.is_floating_point():
            self._differentiable.add(node)
        layouts = (self._values[source].layout, *self._others[source]) if source in self._others else ()
        self._values[node] = _Value(local, layouts[index] if layouts else TensorLayout.replicated(value.dim()))

    def _layout_of(self, node: fx.Node) -> TensorLayout | None:
        """Return a value's layout; None for a parameter whose layout its first use will decide."""
        if node in self._parameters and self._parameters[node] is None:
            return None
        return self._values[node].layout

    def _input(self, node: fx.Node, wanted: TensorLayout, entered: Axes) -> fx.Node:
        if node in self._parameters:
            return self._parameter(node, wanted, entered)
        value = self._values[node]
        steps = plan_redistribution(value.layout, wanted)
        enters = bool(entered) and node in self._differentiable
        local = value.node
        for index, step in enumerate(steps):
            collective = Collective(step.kind, step.axes, step.dim, step.from_dim)
            if enters and index == len(steps) - 1 and step.kind == "gather" and set(step.axes) <= set(entered):
                # gather then enter along the same axes: the way back is one reduce-scatter
                collective = Collective("gather_enter", step.axes, step.dim)
                entered = tuple(axis for axis in entered if axis not in step.axes)
            local = self._shared(local, collective)
        if enters and entered:
            local = self._shared(local, Collective("enter", entered))
        return local

    def _shared(self, local: fx.Node, collective: Collective) -> fx.Node:
        key = (local, str(collective))
        if key not in self._moved:
            self._moved[key] = self._build.collective(collective, local)
        return self._moved[key]

    def _parameter(self, node: fx.Node, wanted: TensorLayout, entered: Axes) -> fx.Node:
        """A parameter is stored as its first use wants it; the sum of its gradient is the parameter's own business."""
        use = self._parameters[node]
        value = node.meta["val"]
        if use is None:
            use = ParameterUse(
                self._captured.parameters[node.name],
                tuple(value.shape),
                value.dtype,
                wanted,
                entered,
                self._values[node].node,
            )
            self._parameters[node] = use
            self._values[node] = _Value(use.node, wanted)
            return use.node
        if use.layout != wanted:
            raise StrategyError(
                f"parameter {use.name}: used as {use.layout.numbers(self._mesh)} by one operator and as "
                f"{wanted.numbers(self._mesh)} by another; give the operators that share it the same strategy for it"
            )
        if use.partial_axes != entered:
            raise StrategyError(
                f"parameter {use.name}: its gradient is a sum over axes {use.partial_axes} at one use and "
                f"{entered} at another; give the operators that share it strategies with equal batch parts"
            )
        return use.node

    # -- results ------------------------------------------------------------------------------------------------

    def _output(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        held = self._values[value]
        shape = tuple(value.meta["val"].shape)
        wanted = TensorLayout.replicated(len(shape))
        if shape and shape[0] % self._mesh.extent(self._batch_axes) == 0:
            wanted = TensorLayout((self._batch_axes, *((),) * (len(shape) - 1)))
        return self._input(value, wanted, ()) if held.layout != wanted else held.node

    def _buffer_updates(self) -> None:
        for name, value in self._captured.buffer_updates.items():
            wanted = TensorLayout.replicated(value.meta["val"].dim())
            self._program.buffer_updates[self._program.buffers[name]] = self._input(value, wanted, ())

    def _record(self, call: OperatorCall, rule: Rule, form: Form, split: LabelSplit, origin: str, before: int) -> None:
        added = list(self._graph.nodes)[before:]
        self._program.operators.append(
            OperatorPlan(
                name=call.node.name,
                operator=call.operator.removesuffix(".default"),
                module_path=call.module_path,
                strategy=tuple(form.layout(labels, split).numbers(self._mesh) for labels in form.inputs),
                origin=origin,
                collectives=tuple(str(n.kwargs["collective"]) for n in added if "collective" in n.kwargs),
            )
        )
        if rule is REPLICATED and call.tensors:
            self._note_replicated(str(call.node.target))

    def _note_replicated(self, operator: str) -> None:
        note = f"{operator} has no rule: every rank computes all of it"
        if note not in self._program.notes:
            self._program.notes.append(note)
