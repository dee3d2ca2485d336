"""Problem: operators with priced choices, and what every pair of choices of neighbours costs.

The cost of a plan is the sum of the seconds of its choices and of its edges. It is linear, so that it can be solved
exactly; `price` tells the whole truth of a plan afterwards, with redistributions that several readers share.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from msrun.errors import StrategyError
from msrun.runtime.capture.assignment import follows_region, layout_constraint, strategy_of
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.operators import TensorSpec, copy_work, message_seconds
from msrun.runtime.partition.collective_messages import LocalCollective, Message, sums_of_gradient
from msrun.runtime.partition.decide import Constraints, is_whole_operator
from msrun.runtime.partition.events import LocalWork, LocalWorks
from msrun.runtime.partition.price import GradientFlow, StepSpec
from msrun.runtime.partition.reads import layout_of_result, layouts_of_outputs
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes, Mesh, Move, TensorLayout, plan_directly
from msrun.runtime.sharding.operators.registry import REPLICATED, find_rule
from msrun.runtime.sharding.operators.rule import Form, LabelSplit, OperatorCall, Rule, operator_call
from msrun.runtime.sharding.strategies import choose_split

Costs = NDArray[np.float64]
Choice = list[int]
"""For each variable the number of its chosen split."""


@dataclass
class Variable:
    """One operator, or several that read the same values and are cut alike, such as query, key and value."""

    nodes: list[str]
    """Captured operators."""
    splits: list[LabelSplit]
    seconds: Costs
    """[splits]: compute, messages of its own, gradients of its parameters, and of what only follows it."""
    memory: Costs
    """[splits]: bytes of its parameters with gradients and optimizer state, and of what it keeps."""
    is_fixed: bool = False
    """Its split is the user's."""


@dataclass
class Problem:
    """What a search solves."""

    variables: list[Variable] = field(default_factory=list)
    edges: dict[tuple[int, int], Costs] = field(default_factory=dict)
    """(variable, later variable) -> [splits, splits]: seconds to bring values from the one to the other."""
    constant: float = 0.0

    def add_edge(self, first: int, second: int, seconds: Costs) -> None:
        """Add what an edge costs; [splits of first, splits of second]."""
        key, costs = ((first, second), seconds) if first < second else ((second, first), seconds.T)
        self.edges[key] = self.edges[key] + costs if key in self.edges else costs

    def seconds(self, choice: Sequence[int]) -> float:
        """Return the cost of a plan."""
        own = sum(float(v.seconds[number]) for v, number in zip(self.variables, choice, strict=True))
        between = sum(float(costs[choice[i], choice[j]]) for (i, j), costs in self.edges.items())
        return self.constant + own + between

    def memory(self, choice: Sequence[int]) -> float:
        """Return the bytes of a plan, as far as choices tell them one by one."""
        return sum(float(v.memory[number]) for v, number in zip(self.variables, choice, strict=True))

    def weighing_memory(self, seconds_per_byte: float) -> Problem:
        """Return the problem in which memory costs time too."""
        variables = [
            Variable(v.nodes, v.splits, v.seconds + seconds_per_byte * v.memory, v.memory, v.is_fixed)
            for v in self.variables
        ]
        return Problem(variables, self.edges, self.constant)

    def neighbours(self) -> list[dict[int, Costs]]:
        """Return for every variable its neighbours, each with [own splits, splits of the neighbour]."""
        found: list[dict[int, Costs]] = [{} for _ in self.variables]
        for (i, j), costs in self.edges.items():
            found[i][j] = costs
            found[j][i] = costs.T
        return found

    def splits(self, choice: Sequence[int]) -> Mapping[str, LabelSplit]:
        """Return captured operator -> its split."""
        return {
            node: variable.splits[number]
            for variable, number in zip(self.variables, choice, strict=True)
            for node in variable.nodes
        }


MOST_AXES_FREE = 2
"""On a mesh of so many axes every axis may cut any dimension; on a larger one the outer and the inner axes go together,
as data parallel between hosts and tensor parallel in a host do."""
MOST_INNER_RANKS = 16
"""Ranks that the inner axes of a larger mesh may have."""


def find_splits(form: Form, mesh: Mesh) -> list[LabelSplit]:
    """Return the legal splits of an operator, the whole one first; the order is the same on every rank."""
    labels = _labels(form)
    found: dict[tuple[tuple[str, Axes], ...], LabelSplit] = {(): {}}
    for pieces, places in _placements(mesh, labels):
        split: dict[str, Axes] = {}
        for axes, label in zip(pieces, places, strict=True):
            if label is not None:
                split[label] = (*split.get(label, ()), *axes)
        is_one_way = sum(way in split for way in form.ways) < 2
        if is_one_way and all(form.can_split(label, mesh.extent(axes)) for label, axes in split.items()):
            found.setdefault(tuple(sorted(split.items())), split)
    return list(found.values())


def parts_of(form: Form, split: LabelSplit, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return MindSpore's tuples of a split: parts per dimension, per input."""
    return tuple(form.layout_of_input(index, split, mesh).numbers(mesh) for index in range(len(form.inputs)))


def _labels(form: Form) -> list[str]:
    """Return the labels that may be cut at all, in order of appearance."""
    rows = (*form.inputs, form.output, *form.others, tuple(form.ways))
    seen = dict.fromkeys(label for labels in rows for label in labels if label is not None)
    uncut = {*form.whole, *form.ways.values()}
    return [label for label in seen if label not in uncut and form.sizes[label] > 1]


def _placements(mesh: Mesh, labels: Sequence[str]) -> Iterator[tuple[tuple[Axes, ...], tuple[str | None, ...]]]:
    """Yield runs of axes and the label that each of them cuts, or None."""
    places: list[str | None] = [*labels, None]
    if len(mesh.axes) <= MOST_AXES_FREE:
        pieces: tuple[Axes, ...] = tuple((axis,) for axis in mesh.axes)
        for chosen in itertools.product(places, repeat=len(pieces)):
            yield pieces, chosen
        return
    for begin in range(len(mesh.axes) + 1):
        outer, inner = mesh.axes[:begin], mesh.axes[begin:]
        if inner and mesh.extent(inner) > MOST_INNER_RANKS and outer:
            continue
        for first, second in itertools.product(places if outer else [None], places if inner else [None]):
            if first is not None or not outer:  # what the outer axes leave whole, the inner ones need not cut
                yield (outer, inner), (first, second)


_COPY = "copy"
_Passed = tuple[str, Axes, int]
"""Operation, or a copy beside it; axes; and the value's bytes divided by the message's."""


@dataclass(frozen=True)
class MovedValue:
    """A value on its way to a reader."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    has_gradient: bool
    """Whether a gradient comes back."""


class SplitCosts:
    """Prices choices on one mesh; equal questions are answered once."""

    def __init__(self, device: DeviceProfile, step: StepSpec, works: LocalWorks) -> None:
        self.works = works
        self._mesh = works.mesh
        self._device = device
        self._step = step
        self._brought: dict[tuple[Any, ...], float] = {}
        self._messages: dict[tuple[TensorLayout, TensorLayout, Axes, bool], tuple[_Passed, ...]] = {}
        self._tables: dict[tuple[Any, ...], Costs] = {}

    def of_work(self, work: LocalWork) -> float:
        """Return the seconds of an operator with its own messages, forward and backward."""
        messages = (self._of_collective(each, waits=index == 0) for index, each in enumerate(work.collectives))
        return sum(work.compute_seconds(self._device)) + sum(messages)

    def kept_bytes(self, call: OperatorCall, form: Form, split: LabelSplit, work: LocalWork) -> float:
        """Return what an operator keeps for the backward pass beside its inputs, which their makers keep."""
        results = [call.node.meta["val"]] if isinstance(call.node.meta["val"], Tensor) else call.node.meta["val"]
        rows = (form.output, *form.others)
        made = [
            TensorSpec(form.layout(labels, split).local_shape(self._mesh, value.shape), value.dtype).nbytes
            for labels, value in zip(rows, results, strict=False)
            if isinstance(value, Tensor)
        ]
        is_read_back = bool(work.backward) and not work.is_alias
        return work.saved_bytes + (sum(made) if is_read_back else 0)

    def of_parameter(
        self, value: Tensor, layout: TensorLayout, partial_axes: Axes, *, is_trained: bool
    ) -> tuple[float, float]:
        """Return seconds and bytes of a parameter that an operator reads in this layout.

        Where its gradient travels with others, it counts with its bytes and its share of the bucket.
        """
        size = TensorSpec(layout.local_shape(self._mesh, value.shape), value.dtype).nbytes
        if not is_trained:
            return 0.0, float(size)
        states = self._step.optimizer_states
        update = size * (3 + 2 * states) / self._device.memory_bandwidth
        messages = sums_of_gradient(self._step.summed_bytes(size, value.dtype), (), partial_axes, self._mesh)
        return update + sum(self._shared(message, axes, size) for message, axes in messages), size * (2.0 + states)

    def table(
        self, value: MovedValue, held: Sequence[TensorLayout], wanted: Sequence[TensorLayout], entered: Sequence[Axes]
    ) -> Costs:
        """Return the seconds from every held layout to every wanted one; [held, wanted]."""
        key = (value, tuple(held), tuple(wanted), tuple(entered))
        if key not in self._tables:
            pairs = list(zip(wanted, entered, strict=True))
            rows = {layout: number for number, layout in enumerate(dict.fromkeys(held))}
            columns = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
            small = np.array([[self.to_bring(value, layout, *pair) for pair in columns] for layout in rows])
            self._tables[key] = small[np.ix_([rows[layout] for layout in held], [columns[pair] for pair in pairs])]
        return self._tables[key]

    def row(
        self, value: MovedValue, held: Sequence[TensorLayout], wanted: Sequence[TensorLayout], entered: Sequence[Axes]
    ) -> Costs:
        """Return the seconds from each held layout to the wanted one at its place; [held]."""
        key = (value, tuple(held), tuple(wanted), tuple(entered), "row")
        if key not in self._tables:
            each = zip(held, wanted, entered, strict=True)
            self._tables[key] = np.array([self.to_bring(value, *layouts) for layouts in each])
        return self._tables[key]

    def to_bring(self, value: MovedValue, held: TensorLayout, wanted: TensorLayout, entered: Axes) -> float:
        """Return the seconds to bring a value from one layout to another, and its gradient back.

        Args:
            entered: axes along which the reader leaves partial sums of the gradient.
        """
        entered = entered if value.has_gradient else ()
        if held == wanted and not entered:
            return 0.0
        key = (value, held, wanted, entered)
        if key not in self._brought:
            self._brought[key] = self._bring(value, held, wanted, entered)
        return self._brought[key]

    def _bring(self, value: MovedValue, held: TensorLayout, wanted: TensorLayout, entered: Axes) -> float:
        size = TensorSpec(value.shape, value.dtype).nbytes
        return sum(
            self._copy_s(size // parts)
            if operation == _COPY
            else self._seconds(Message(operation, size // parts, self._mesh.extent(axes)), axes)
            for operation, axes, parts in self._passed(held, wanted, entered, value.has_gradient)
        )

    def _passed(
        self, held: TensorLayout, wanted: TensorLayout, entered: Axes, has_gradient: bool
    ) -> tuple[_Passed, ...]:
        """Return the messages between two layouts, which inner dimensions that neither cuts do not change."""
        dims = [dim for dim, pair in enumerate(zip(held.split, wanted.split, strict=True)) if any(pair) or not dim]
        held, wanted = (TensorLayout(tuple(layout.split[dim] for dim in dims)) for layout in (held, wanted))
        key = (held, wanted, entered, has_gradient)
        if key not in self._messages:
            self._messages[key] = tuple(self._find_passed(*key))
        return self._messages[key]

    def _find_passed(
        self, layout: TensorLayout, wanted: TensorLayout, entered: Axes, has_gradient: bool
    ) -> Iterator[_Passed]:
        shape = (self._mesh.size,) * len(layout.split)
        whole = math.prod(shape)
        chain = [*plan_directly(Move(self._mesh, layout, wanted, shape, has_gradient)), None]
        for step in chain:
            if step is not None:
                collective, after = Collective(step.kind, step.axes, step.dim, step.from_dim), step.after(layout)
                if step.kind == "gather" and entered and set(step.axes) <= set(entered) and after == wanted:
                    entered = tuple(axis for axis in entered if axis not in step.axes)
                    collective = Collective("gather_enter", step.axes, step.dim)  # the way back is one reduce-scatter
            elif entered:
                collective, after = Collective("enter", entered), layout
            else:
                return
            spec = TensorSpec(layout.local_shape(self._mesh, shape), torch.int8)
            crossing = LocalCollective(collective, spec, has_gradient)
            for message in crossing.messages(self._mesh, self._mesh.first_rank):
                if message is not None:
                    yield message.operation, collective.axes, whole // message.bytes
            for copied in itertools.chain(*crossing.copies(self._mesh)):
                yield _COPY, (), whole // copied
            layout = after

    def _of_collective(self, crossing: LocalCollective, *, waits: bool) -> float:
        found, axes = crossing.messages(self._mesh, self._mesh.first_rank), crossing.collective.axes
        copies = map(self._copy_s, itertools.chain(*crossing.copies(self._mesh)))
        return sum(copies) + sum(self._seconds(each, axes, waits=waits) for each in found if each is not None)

    def _copy_s(self, nbytes: int) -> float:
        return copy_work(nbytes).seconds(self._device)

    def _seconds(self, message: Message, axes: Axes, *, waits: bool = True) -> float:
        return message_seconds(message.operation, message.bytes, self._mesh, axes, self._device, waits=waits)

    def _shared(self, message: Message, axes: Axes, stored: int) -> float:
        """Return the seconds of a parameter's message that shares a bucket with others, and their wait."""
        seconds, bucket = self._seconds(message, axes, waits=False), self._step.bucket_bytes
        if self._step.is_alone(stored):
            return seconds
        empty = message_seconds(message.operation, 0, self._mesh, axes, self._device, waits=False)
        share = 0.0 if bucket is None else min(1.0, stored / bucket)
        return max(0.0, seconds - (1.0 - share) * empty)


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
        self._alike: dict[tuple[Hashable, tuple[str, ...]], int] = {}
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
