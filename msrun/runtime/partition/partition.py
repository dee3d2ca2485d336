"""Partition: the captured graph becomes the local program of every rank, as decided."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from functools import partial

import torch
from torch import fx

from msrun.runtime.capture.assignment import layout_constraint
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.partition.decide import is_whole_operator
from msrun.runtime.partition.program import (
    MODULE_PATH,
    ORIGIN,
    OWN,
    Decisions,
    LocalProgram,
    OperatorDecision,
    OperatorPlan,
    ParameterUse,
    Read,
)
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import TensorLayout
from msrun.runtime.sharding.operators.registry import REPLICATED, find_rule
from msrun.runtime.sharding.operators.rule import LocalBuilder, OperatorCall, Rule, collective_of, operator_call
from msrun.runtime.sharding.operators.table_lookup import gives_rows


def lower(captured: CapturedGraph, decisions: Decisions) -> LocalProgram:
    """Return the local program; the same decisions give the same graph."""
    return _Lowering(captured, decisions).run()


class _Lowering:
    def __init__(self, captured: CapturedGraph, decisions: Decisions) -> None:
        self._captured = captured
        self._decisions = decisions
        self._mesh = decisions.mesh
        self._graph = fx.Graph()
        self._build = LocalBuilder(self._graph, self._mesh)
        self._values: dict[str, fx.Node] = {}
        """captured node -> its local result, also of those whose results are a list"""
        self._held: dict[tuple[str, TensorLayout], fx.Node] = {}
        """(captured node, layout) -> its local value"""
        self._made: dict[tuple[fx.Node, str], fx.Node] = {}
        """(local node, collective) -> result"""
        self._program = LocalProgram(self._graph, self._mesh, {}, {}, {}, [], list(decisions.input_layouts), [], [])
        self._program.differentiable_inputs = decisions.differentiable_inputs
        self._program.output_layouts = list(decisions.output_layouts)

    def run(self) -> LocalProgram:
        """Walk the captured graph once."""
        for node in self._captured.graph.nodes:
            newest = self._newest
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._operator(node, self._decisions.operators[node.name])
            self._stamp(node, newest)
        before, program = self._newest, self._program
        program.outputs = [
            self._result(value) if isinstance(value, Read) else value for value in self._decisions.outputs
        ]
        for name, read in self._decisions.buffer_updates.items():
            program.buffer_updates[program.buffers[name]] = self._result(read)
        program.collectives.append(self._collectives_since(before))
        self._graph.output(tuple(program.outputs))
        program.values = {
            name: (self._values[name], decision.layouts[0])
            for name, decision in self._decisions.operators.items()
            if name in self._values and decision.layouts
        }
        for use in program.parameters.values():
            use.has_row_gradient = any(gives_rows(n) for n in use.node.users)
        program.redistributions = self._decisions.redistributions
        program.notes += self._decisions.notes
        return program

    def _placeholder(self, node: fx.Node) -> None:
        local = self._graph.placeholder(node.name)
        value = local.meta["val"] = node.meta["val"]
        if node.name in self._captured.parameters:
            name = self._captured.parameters[node.name]
            if name in self._program.parameters:  # a tied one is read as its first placeholder
                return
            stored = self._decisions.parameters[name]
            self._held[node.name, stored.layout] = local
            self._program.parameters[name] = ParameterUse(
                name, tuple(value.shape), value.dtype, stored.layout, stored.partial_axes, local
            )
        elif node.name in self._captured.buffers:
            self._program.buffers[self._captured.buffers[node.name]] = local
            self._held[node.name, TensorLayout.replicated(value.dim())] = local
        elif node.name in self._captured.constants:
            self._program.constants[node.name] = (local, self._captured.constants[node.name])
            self._held[node.name, TensorLayout.replicated(value.dim())] = local
        else:
            index = self._captured.inputs.index(node.name)
            self._program.inputs.append(local)
            self._held[node.name, self._decisions.input_layouts[index]] = local

    @property
    def _newest(self) -> fx.Node | None:
        return next(iter(reversed(self._graph.nodes)), None)  # before torch 2.13 it is no iterator

    def _made_since(self, before: fx.Node | None) -> list[fx.Node]:
        made = itertools.takewhile(partial(operator.is_not, before), reversed(self._graph.nodes))
        return list(made)[::-1]

    def _stamp(self, captured: fx.Node, before: fx.Node | None) -> None:
        """Write on the local nodes after `before` what they were made for."""
        for made in self._made_since(before):
            made.meta[ORIGIN] = captured
            if made.op == "call_function":
                made.meta[MODULE_PATH] = operator_call(captured).module_path

    # -- operators ----------------------------------------------------------------------------------------------

    def _operator(self, node: fx.Node, decision: OperatorDecision) -> None:
        mark = layout_constraint(node)
        if node.target is operator.getitem:
            self._item(node, decision)
        elif mark is not None:
            before = self._newest
            self._held[node.name, decision.layouts[0]] = self._read(decision.reads[0])
            kind = "out_strategy" if mark.leaves else "in_strategy"
            moved = self._collectives_since(before)
            self._program.collectives.append(moved)
            numbers = decision.layouts[0].numbers(self._mesh)
            self._program.operators.append(
                OperatorPlan(node.name, kind, mark.name, (numbers,), decision.origin, _texts(moved))
            )
        else:
            rule = find_rule(node.target)
            if is_whole_operator(node, rule):
                self._whole_operator(node, decision)
            else:
                self._with_rule(node, decision, rule or REPLICATED)

    def _with_rule(self, node: fx.Node, decision: OperatorDecision, rule: Rule) -> None:
        call = operator_call(node)
        form = rule.form(call)
        before = self._newest
        inputs = [self._read(read) for read in decision.reads]
        read = self._newest
        self._build.scatter = decision.scatter
        result = rule.lower(call, form, self._build, inputs, decision.split)
        self._build.scatter = None
        for collective in self._collectives_since(read):
            collective.meta[OWN] = True
        self._values[node.name] = result
        self._held[node.name, decision.layouts[0]] = result
        layouts = [form.layout_of_input(i, decision.split, self._mesh) for i in range(len(form.inputs))]
        self._record(call, decision, layouts, before)
        if rule is REPLICATED and call.tensors:
            self._note_replicated(str(node.target))

    def _whole_operator(self, node: fx.Node, decision: OperatorDecision) -> None:
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        local = {n: self._read(read) for n, read in zip(tensors, decision.reads, strict=True)}
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda n: local[n] if n in local else self._values[n.name]
        )
        assert callable(node.target)
        self._values[node.name] = self._graph.call_function(node.target, args, kwargs)
        self._held[node.name, TensorLayout(())] = self._values[node.name]
        self._note_replicated(str(node.target))

    def _item(self, node: fx.Node, decision: OperatorDecision) -> None:
        (source, index) = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        packed = self._build.packed.get(self._values[source.name], {})
        if packed and index not in packed:  # its rule leaves out what nobody reads
            return
        local = (
            packed[index] if packed else self._graph.call_function(operator.getitem, (self._values[source.name], index))
        )
        self._values[node.name] = self._held[node.name, decision.layouts[0]] = local

    # -- values -------------------------------------------------------------------------------------------------

    def _read(self, read: Read) -> fx.Node:
        """Return a value as its reader has it, made by the collectives on its way."""
        local = self._held[read.source, read.layout]
        for collective, layout in read.steps:
            local = self._make(local, collective)
            if layout is not None:
                self._held.setdefault((read.source, layout), local)
        return local

    def _make(self, local: fx.Node, collective: Collective) -> fx.Node:
        key = (local, str(collective))
        if key not in self._made:
            self._made[key] = self._build.collective(collective, local)
        return self._made[key]

    def _result(self, read: Read) -> fx.Node:
        """Return a value that outlives the program: of a parameter a copy, as its own memory may be given back."""
        local = self._read(read)
        is_parameter = read.source in self._captured.parameters and local.op == "placeholder"
        return self._build.call(torch.ops.aten.clone.default, local) if is_parameter else local

    # -- for the plan -------------------------------------------------------------------------------------------

    def _collectives_since(self, before: fx.Node | None) -> list[fx.Node]:
        return [node for node in self._made_since(before) if collective_of(node) is not None]

    def _record(
        self, call: OperatorCall, decision: OperatorDecision, layouts: Sequence[TensorLayout], before: fx.Node | None
    ) -> None:
        added = self._collectives_since(before)
        self._program.collectives.append(added)
        self._program.operators.append(
            OperatorPlan(
                name=call.node.name,
                operator=call.operator.removesuffix(".default"),
                module_path=call.module_path,
                strategy=tuple(layout.numbers(self._mesh) for layout in layouts),
                axes=tuple(layout.split for layout in layouts),
                origin=decision.origin,
                collectives=_texts(added),
                repeats=self._mesh.size // math.prod(self._mesh.extent(axes) for axes in decision.split.values()),
            )
        )

    def _note_replicated(self, name: str) -> None:
        note = f"{name} has no rule: every rank computes all of it"
        if note not in self._program.notes:
            self._program.notes.append(note)


def _texts(collectives: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(str(collective_of(node)) for node in collectives)
