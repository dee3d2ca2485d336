"""The problem of a captured graph: which operators have a choice, and what their choices cost.

An operator that keeps its input's layout has no choice: it belongs to the operator whose value it continues, and its
cost with it. Operators that read the same values, are alike and have parameters are one choice.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, fx

from msrun.errors import StrategyError
from msrun.runtime.capture.assignment import follows_region, layout_constraint, strategy_of
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.partition.decide import Constraints, is_whole_operator
from msrun.runtime.partition.layout_constraints import layout_of_result, layouts_of_outputs
from msrun.runtime.partition.local_work import LocalWorks
from msrun.runtime.partition.price import GradientFlow, StepSpec
from msrun.runtime.search.problem import Costs, Problem, Variable
from msrun.runtime.search.split_costs import MovedValue, SplitCosts, find_splits, parts_of
from msrun.runtime.sharding.layout import Axes, TensorLayout
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


@dataclass(frozen=True)
class _Options:
    """What an operator takes and needs, for each of some splits."""

    seconds: Costs
    memory: Costs
    wanted: tuple[Layouts, ...]
    """Of every tensor input."""
    entered: tuple[list[Axes], ...]
    """For every tensor input the axes along which its gradient is left a partial sum; none without a gradient."""
    results: tuple[Layouts, ...]


class ProblemBuilder:
    """Walks the captured graph once; what equal calls ask, such as those of a stack of layers, is answered once."""

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
        self._splits_of: dict[Hashable, list[LabelSplit]] = {}
        self._options_of: dict[Hashable, _Options] = {}

    def build(self) -> Problem:
        """Return the problem."""
        for node in self._captured.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._operator(node)
        wanted = layouts_of_outputs(self._captured, self._mesh, self._given.output_batch_axes)
        for value, layout in zip(self._captured.outputs, wanted, strict=True):
            if layout is not None and value in self._places:
                self._bring(value, [layout], None, ())
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
        options = self._options(call, rule, form, splits)
        if known is not None:
            self._problem.variables[known].nodes.append(node.name)
            self._add_to(known, options.seconds, options.memory)
            self._places[node] = _Place(known, options.results)
            return
        index = len(self._problem.variables)
        own = Variable([node.name], splits, options.seconds.copy(), options.memory.copy(), fixed is not None)
        self._problem.variables.append(own)
        if fixed is None and has_parameters:
            self._alike[key] = index
        self._bring_inputs(call, options, index)
        self._places[node] = _Place(index, options.results)

    def _bring_inputs(self, call: OperatorCall, options: _Options, owner: int | None) -> None:
        for tensor, wanted, entered in zip(call.tensors, options.wanted, options.entered, strict=True):
            if tensor in self._places:
                self._bring(tensor, wanted, owner, entered)

    def _splits(self, call: OperatorCall, rule: Rule, form: Form) -> list[LabelSplit]:
        """Return the splits that an operator may have: those of the user's numbers, or with a stored parameter's
        layout, where there are such."""
        strategy = strategy_of(call.node)
        names = [self._captured.parameters.get(tensor.name, "") for tensor in call.tensors]
        known = self._given.stored
        if strategy is None and not any(name in known for name in names):
            question = self._question(call, form)
            if question not in self._splits_of:
                self._splits_of[question] = self._legal(call, rule, form, find_splits(form, self._mesh))
            return self._splits_of[question]
        splits = find_splits(form, self._mesh)
        if strategy is not None:
            layouts: list[TensorLayout | None] = [
                self._places[tensor].layouts[0][0] if tensor in self._places else None for tensor in call.tensors
            ]
            chosen, _ = choose_split(call, rule, form, self._mesh, strategy, layouts)
            alike = [each for each in splits if parts_of(form, each, self._mesh) == parts_of(form, chosen, self._mesh)]
            return [chosen] if any(strategy.layouts) else [chosen, *(each for each in alike if each != chosen)]
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

    def _question(self, call: OperatorCall, form: Form) -> Hashable:
        """Return what is equal for calls that have the same choices and prices."""
        parameters = tuple(tensor.name in self._captured.parameters for tensor in call.tensors)
        rows = (form.inputs, form.output, form.others, form.whole, form.added)
        return self._costs.works.signature(call.node), *rows, parameters, tuple(self._needed(call.node, call))

    def _options(self, call: OperatorCall, rule: Rule, form: Form, splits: Sequence[LabelSplit]) -> _Options:
        """Return the seconds and bytes of an operator and its parameters with what it needs, for each split."""
        cuts = tuple(tuple(sorted((label, axes) for label, axes in split.items() if axes)) for split in splits)
        question = (self._question(call, form), cuts)
        if question not in self._options_of:
            self._options_of[question] = self._find_options(call, rule, form, splits)
        return self._options_of[question]

    def _find_options(self, call: OperatorCall, rule: Rule, form: Form, splits: Sequence[LabelSplit]) -> _Options:
        needed = self._needed(call.node, call)
        works = [self._costs.works.of(call, rule, form, split, differentiable=needed) for split in splits]
        pairs = zip(splits, works, strict=True)
        seconds = np.array([self._costs.of_work(work) for work in works], float)
        memory = np.array([self._costs.kept_bytes(call, form, split, work) for split, work in pairs], float)
        numbers = range(len(call.tensors))
        wanted = tuple([form.layout_of_input(number, split, self._mesh) for split in splits] for number in numbers)
        entered = tuple([form.entered(number, split) for split in splits] for number in numbers)
        for number, tensor in enumerate(call.tensors):
            if tensor.name in self._captured.parameters:
                found = [
                    self._costs.of_parameter(tensor.meta["val"], layout, axes, is_trained=needed[number])
                    for layout, axes in zip(wanted[number], entered[number], strict=True)
                ]
                seconds += np.array([each for each, _ in found])
                memory += np.array([each for _, each in found])
        entered = tuple(
            axes if is_needed else [()] * len(axes) for axes, is_needed in zip(entered, needed, strict=True)
        )
        results = tuple([form.layout(labels, split) for split in splits] for labels in (form.output, *form.others))
        return _Options(seconds, memory, wanted, entered, results)

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
        options = self._options(call, rule, form, [split_of[layout] for layout in held])
        self._add_to(owner, options.seconds, options.memory)
        self._bring_inputs(call, options, owner)
        self._places[node] = _Place(owner, options.results)

    def _add_to(self, owner: int | None, seconds: Costs, memory: Costs) -> None:
        if owner is None:
            self._problem.constant += float(seconds[0])
            return
        self._problem.variables[owner].seconds += seconds
        self._problem.variables[owner].memory += memory

    def _bring(self, node: fx.Node, wanted: Layouts, owner: int | None, entered: Sequence[Axes]) -> None:
        """Add what it costs to bring a value to the layouts that the splits of its reader want.

        Args:
            wanted: one for each split of `owner`, the reader's variable; one alone without an owner.
            entered: axes along which each split leaves partial sums of the gradient; () without a gradient.
        """
        value, place = node.meta["val"], self._places[node]
        moved = MovedValue(tuple(value.shape), value.dtype, node in self._flow.reached)
        axes, held = entered or [()] * len(wanted), place.layouts[0]
        if place.owner is not None and place.owner == owner:
            costs = self._costs.row(moved, held, wanted, axes)
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
