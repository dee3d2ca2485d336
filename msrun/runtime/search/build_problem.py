"""The problem of a captured graph: which operators have a choice, and what their choices cost.

An operator that keeps its input's layout has no choice: it belongs to the operator whose value it continues, and its
cost with it. Operators that read the same values, are alike and have parameters are one choice.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, fx

from msrun.errors import StrategyError
from msrun.runtime.capture.assignment import follows_region, layout_constraint, strategy_of
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.partition.decide import Constraints, is_whole_operator
from msrun.runtime.partition.gradient_flow import GradientFlow
from msrun.runtime.partition.layout_constraints import layout_of_result
from msrun.runtime.partition.local_work import LocalWorks
from msrun.runtime.partition.price import StepSpec
from msrun.runtime.search.problem import Costs, Problem, Variable
from msrun.runtime.search.split_costs import MovedValue, SplitCosts
from msrun.runtime.search.splits import find_splits, parts_of
from msrun.runtime.sharding.layout import TensorLayout
from msrun.runtime.sharding.operators.registry import REPLICATED, find_rule
from msrun.runtime.sharding.operators.rule import Form, LabelSplit, OperatorCall, Rule, operator_call
from msrun.runtime.sharding.strategies import choose_split

Layouts = list[TensorLayout]


@dataclass(frozen=True)
class _Place:
    """Where a value is."""

    owner: int | None
    """The variable whose choice decides it; None: it is where it is."""
    layouts: tuple[Layouts, ...]
    """Of every result of its operator: for each split of the owner, or one."""


class ProblemBuilder:
    """Walks the captured graph once."""

    def __init__(
        self,
        captured: CapturedGraph,
        constraints: Constraints,
        device: DeviceProfile,
        step: StepSpec,
        works: LocalWorks,
        flow: GradientFlow,
    ) -> None:
        self._captured = captured
        self._given = constraints
        self._mesh = works.mesh
        self._flow = flow
        self._costs = SplitCosts(device, step, works)
        self._problem = Problem()
        self._places: dict[fx.Node, _Place] = {}
        self._alike: dict[tuple[str, tuple[str, ...]], int] = {}
        """(signature, values read) -> variable"""

    def build(self) -> Problem:
        """Return the problem."""
        for node in self._captured.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._operator(node)
        axes = self._given.output_batch_axes
        for value in self._captured.outputs:
            if isinstance(value, fx.Node) and value in self._places:
                shape = value.meta["val"].shape
                is_cut = bool(shape) and shape[0] % self._mesh.extent(axes) == 0
                wanted = (
                    TensorLayout((axes, *((),) * (len(shape) - 1))) if is_cut else TensorLayout.replicated(len(shape))
                )
                self._bring(value, [wanted], None, ())
        return self._problem

    def _placeholder(self, node: fx.Node) -> None:
        if node.name in self._captured.parameters:
            return
        layout = TensorLayout.replicated(node.meta["val"].dim())
        if node.name in self._captured.inputs:
            layout = self._given.input_layouts[self._captured.inputs.index(node.name)]
        self._places[node] = _Place(None, ([layout],))

    def _operator(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            place = self._places[source]
            whole = [TensorLayout.replicated(node.meta["val"].dim())]
            self._places[node] = (
                _Place(place.owner, (place.layouts[index],)) if place.layouts else _Place(None, (whole,))
            )
            return
        rule = find_rule(node.target)
        if layout_constraint(node) is not None:
            self._mark(node)
        elif is_whole_operator(node, rule):
            for source in node.all_input_nodes:
                self._bring_whole(source)
            self._places[node] = _Place(None, ())
        else:
            self._with_rule(node, operator_call(node), rule or REPLICATED)

    def _bring_whole(self, source: fx.Node) -> None:
        value = source.meta.get("val")
        if source in self._places and isinstance(value, Tensor):
            self._bring(source, [TensorLayout.replicated(value.dim())], None, ())

    def _mark(self, node: fx.Node) -> None:
        """Bring a value to the layout that the user wants where it enters or leaves a region."""
        source, wanted = node.args[0], layout_constraint(node)
        assert isinstance(source, fx.Node)
        assert wanted is not None
        shape, place = tuple(node.meta["val"].shape), self._places[source]
        layouts = [layout_of_result(wanted, shape, self._mesh, held, ()) for held in place.layouts[0]]
        self._bring(source, layouts, place.owner, ())
        self._places[node] = _Place(place.owner, (layouts,))

    def _with_rule(self, node: fx.Node, call: OperatorCall, rule: Rule) -> None:
        form = rule.form(call)
        values = [tensor for tensor in call.tensors if tensor in self._places]
        owned = [tensor for tensor in values if self._places[tensor].owner is not None]
        fixed = strategy_of(node)
        is_unary = rule.follows and len(call.tensors) == 1
        if fixed is None and (is_unary or follows_region(node) or not form.sizes):
            self._follow(node, call, rule, form, next(iter(owned or values), None))
            return
        key = (self._costs.works.signature(node), tuple(value.name for value in values))
        has_parameters = len(values) < len(call.tensors)
        known = self._alike.get(key) if fixed is None and has_parameters else None
        splits = self._splits(call, rule, form) if known is None else self._problem.variables[known].splits
        needed = self._needed(node, call)
        seconds, memory = self._own_costs(call, rule, form, splits, needed)
        layouts = tuple([form.layout(labels, split) for split in splits] for labels in (form.output, *form.others))
        if known is not None:
            self._problem.variables[known].nodes.append(node.name)
            self._add_to(known, seconds, memory)
            self._places[node] = _Place(known, layouts)
            return
        index = len(self._problem.variables)
        self._problem.variables.append(Variable([node.name], splits, seconds, memory, fixed is not None))
        if fixed is None and has_parameters:
            self._alike[key] = index
        for number, tensor in enumerate(call.tensors):
            if tensor in self._places:
                wanted = [form.layout_of_input(number, split, self._mesh) for split in splits]
                entered = [form.entered(number, split) for split in splits]
                self._bring(tensor, wanted, index, entered if needed[number] else ())
        self._places[node] = _Place(index, layouts)

    def _splits(self, call: OperatorCall, rule: Rule, form: Form) -> list[LabelSplit]:
        """Return the splits that an operator may have: those of the user's numbers, or with a stored parameter's
        layout, where there are such."""
        splits = find_splits(form, self._mesh)
        strategy = strategy_of(call.node)
        if strategy is not None:
            layouts: list[TensorLayout | None] = [
                self._places[tensor].layouts[0][0] if tensor in self._places else None for tensor in call.tensors
            ]
            chosen, _ = choose_split(call, rule, form, self._mesh, strategy, layouts)
            alike = [each for each in splits if parts_of(form, each, self._mesh) == parts_of(form, chosen, self._mesh)]
            return [chosen] if any(strategy.layouts) else [chosen, *(each for each in alike if each != chosen)]
        names = [self._captured.parameters.get(tensor.name, "") for tensor in call.tensors]
        known = self._given.stored
        stored = [(number, known[name]) for number, name in enumerate(names) if name in known]
        fitting = [
            split
            for split in splits
            if all(form.layout_of_input(number, split, self._mesh) == layout for number, layout in stored)
        ]
        return self._legal(call, rule, form, fitting or splits)

    def _legal(self, call: OperatorCall, rule: Rule, form: Form, splits: Sequence[LabelSplit]) -> list[LabelSplit]:
        """Return the splits that a rule can build."""
        needed, found = self._needed(call.node, call), []
        for split in splits:
            try:
                self._costs.works.of(call, rule, form, split, differentiable=needed)
            except StrategyError:  # such as parts that are smaller than their borders
                continue
            found.append(split)
        return found

    def _needed(self, node: fx.Node, call: OperatorCall) -> list[bool]:
        return [node in self._flow.reached and tensor in self._flow.differentiable for tensor in call.tensors]

    def _own_costs(
        self, call: OperatorCall, rule: Rule, form: Form, splits: Sequence[LabelSplit], needed: Sequence[bool]
    ) -> tuple[Costs, Costs]:
        """Return seconds and bytes of an operator and its parameters, for each split."""
        works = [self._costs.works.of(call, rule, form, split, differentiable=needed) for split in splits]
        pairs = zip(splits, works, strict=True)
        seconds = np.array([self._costs.of_work(work) for work in works], float)
        memory = np.array([self._costs.kept_bytes(call, form, split, work) for split, work in pairs], float)
        for number, tensor in enumerate(call.tensors):
            if tensor.name not in self._captured.parameters:
                continue
            found = [
                self._costs.of_parameter(
                    tensor.meta["val"],
                    form.layout_of_input(number, split, self._mesh),
                    form.entered(number, split),
                    is_trained=needed[number],
                )
                for split in splits
            ]
            seconds += np.array([each for each, _ in found])
            memory += np.array([each for _, each in found])
        return seconds, memory

    def _follow(self, node: fx.Node, call: OperatorCall, rule: Rule, form: Form, source: fx.Node | None) -> None:
        """Let an operator keep what its input brings, and cost its owner what it costs."""
        owner = self._places[source].owner if source is not None else None
        held: Layouts | list[None] = self._places[source].layouts[0] if source is not None else [None]
        is_follower = follows_region(node)
        split_of: dict[TensorLayout | None, LabelSplit] = {}
        for layout in held:
            if layout not in split_of:
                layouts = [layout if tensor is source else None for tensor in call.tensors]
                split_of[layout] = choose_split(call, rule, form, self._mesh, None, layouts, follows=is_follower)[0]
        splits = [split_of[layout] for layout in held]
        needed = self._needed(node, call)
        seconds, memory = self._own_costs(call, rule, form, splits, needed)
        self._add_to(owner, seconds, memory)
        for number, tensor in enumerate(call.tensors):
            if tensor in self._places:
                wanted = [form.layout_of_input(number, split, self._mesh) for split in splits]
                entered = [form.entered(number, split) for split in splits]
                self._bring(tensor, wanted, owner, entered if needed[number] else ())
        layouts_of_results = tuple(
            [form.layout(labels, split) for split in splits] for labels in (form.output, *form.others)
        )
        self._places[node] = _Place(owner, layouts_of_results)

    def _add_to(self, owner: int | None, seconds: Costs, memory: Costs) -> None:
        if owner is None:
            self._problem.constant += float(seconds[0])
            return
        self._problem.variables[owner].seconds += seconds
        self._problem.variables[owner].memory += memory

    def _bring(self, node: fx.Node, wanted: Layouts, owner: int | None, entered: Sequence[tuple[int, ...]]) -> None:
        """Add what it costs to bring a value to the layouts that the splits of its reader want.

        Args:
            wanted: one for each split of `owner`, the reader's variable; one alone without an owner.
            entered: axes along which each split leaves partial sums of the gradient; () without a gradient.
        """
        value, place = node.meta["val"], self._places[node]
        moved = MovedValue(tuple(value.shape), value.dtype, node in self._flow.reached)
        axes, held = entered or [()] * len(wanted), place.layouts[0]
        if place.owner is not None and place.owner == owner:
            each = zip(held, wanted, axes, strict=True)
            costs = np.array([self._costs.to_bring(moved, *layouts) for layouts in each])
            self._add_to(owner, costs, np.zeros(len(costs)))
            return
        table = self._costs.table(moved, held, wanted, axes)
        if place.owner is not None and owner is not None:
            self._problem.add_edge(place.owner, owner, table)
        elif place.owner is not None:
            self._add_to(place.owner, table[:, 0], np.zeros(len(table)))
        else:
            self._add_to(owner, table[0], np.zeros(table.shape[1]))


def build_problem(
    captured: CapturedGraph,
    constraints: Constraints,
    device: DeviceProfile,
    step: StepSpec,
    works: LocalWorks,
    flow: GradientFlow,
) -> Problem:
    """Return the choices of a captured graph with their prices.

    Raises:
        StrategyError: an illegal strategy of the user's.
    """
    return ProblemBuilder(captured, constraints, device, step, works, flow).build()
