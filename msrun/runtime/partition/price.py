"""The price of decisions: seconds and bytes of one training step of one rank, told without lowering them.

Compute follows the roofline, messages the alpha-beta model (see `msrun.runtime.cost`); nothing overlaps, so the seconds
are an upper bound of what the same figures give when messages travel while operators compute. Bytes of parameters,
optimizer state and messages are exact; what is kept between the passes is counted from what every operator saves.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from msrun.runtime.capture.assignment import layout_constraint
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.operators import TensorSpec, copy_work, message_seconds
from msrun.runtime.partition.collective_messages import (
    Message,
    Totals,
    gathers_of_parameter,
    result_shape,
    sums_of_gradient,
)
from msrun.runtime.partition.decide import is_whole_operator
from msrun.runtime.partition.local_work import LocalCollective, LocalWork, LocalWorks, has_gradient
from msrun.runtime.partition.program import Decisions, OperatorDecision, Read
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout
from msrun.runtime.sharding.operators.registry import REPLICATED, find_rule
from msrun.runtime.sharding.operators.rule import operator_call


class GradientFlow:
    """Which values of a captured graph have a gradient, and to which one comes back in a step.

    Gradients enter at the loss: the first result that is a floating-point scalar, or else every result with one.
    """

    def __init__(
        self, captured: CapturedGraph, works: LocalWorks, differentiable_inputs: frozenset[int] = frozenset()
    ) -> None:
        self.differentiable: Set[fx.Node] = _differentiable(captured, works, differentiable_inputs)
        """Nodes that would be given a gradient."""
        self.reached: Set[fx.Node] = self._find_reached(captured)
        """Nodes that get one."""

    def _find_reached(self, captured: CapturedGraph) -> set[fx.Node]:
        results = [node for node in captured.outputs if isinstance(node, fx.Node) and node in self.differentiable]
        waiting = [node for node in results if not node.meta["val"].shape][:1] or results
        reached: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in reached and node in self.differentiable:
                reached.add(node)
                waiting += node.all_input_nodes
        return reached


def _differentiable(captured: CapturedGraph, works: LocalWorks, inputs: frozenset[int]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    given = {captured.inputs[index] for index in inputs}
    for node in captured.graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            is_trained = node.name in captured.parameters and node.meta["val"].requires_grad
            if is_trained or node.name in given:
                found.add(node)
        elif any(source in found for source in node.all_input_nodes) and _passes(node, works, found):
            found.add(node)
    return found


def _passes(node: fx.Node, works: LocalWorks, differentiable: Set[fx.Node]) -> bool:
    """Return whether an operator whose inputs have gradients gives its result one."""
    value = node.meta.get("val")
    rule = find_rule(node.target)
    if node.target is operator.getitem or layout_constraint(node) is not None or is_whole_operator(node, rule):
        return not isinstance(value, Tensor) or has_gradient(value.dtype)
    rule, call = rule or REPLICATED, operator_call(node)
    needed = [source in differentiable for source in call.tensors]
    return works.of(call, rule, rule.form(call), {}, differentiable=needed).is_differentiable


@dataclass(frozen=True)
class StepSpec:
    """What of a step the decisions do not say."""

    shard_axes: Mapping[str, Axes] = field(default_factory=dict)
    """parameter -> axes by which optimizer parallel cuts its dimension 0 further"""
    regathers: bool = False
    """Cut parameters are gathered again for the backward pass: level3."""
    optimizer_states: int = 2
    """Tensors of a parameter's size that the optimizer keeps for it: 2 of Adam, 1 of SGD with momentum."""
    sums_wide: bool = True
    """Gradients of 16 bits travel in float32."""
    bucket_bytes: int | None = 25 * 2**20
    """Parameters of at most so many bytes share a message; None: no limit."""
    alone_bytes: int | None = None
    """A parameter of so many bytes shares none; None: all do."""

    def is_alone(self, nbytes: int) -> bool:
        """Return whether a parameter of so many bytes, as a rank stores it, travels alone."""
        return self.alone_bytes is not None and nbytes >= self.alone_bytes

    def summed_bytes(self, nbytes: int, dtype: torch.dtype) -> int:
        """Return the bytes in which gradients of so many bytes travel."""
        is_half = dtype in (torch.float16, torch.bfloat16)
        return 2 * nbytes if is_half and self.sums_wide else nbytes


@dataclass
class Crossed:
    """One collective that brings a value to its readers."""

    owner: Any
    """Who read it first."""
    collective: Collective
    value: TensorSpec
    """Its input."""
    has_gradient: bool
    """Whether some reader sends a gradient back."""


@dataclass(frozen=True)
class _Value:
    spec: TensorSpec
    storage: int


class HeldValues:
    """Mirrors what lowering makes of reads: two readers of one value share its collectives."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._values: list[_Value] = []
        self._held: dict[tuple[str, TensorLayout], int] = {}
        """(captured node, layout) -> value"""
        self._items: dict[str, list[int]] = {}
        """captured node -> its results"""
        self._made: dict[tuple[int, str], int] = {}
        self._crossed: dict[tuple[int, str], Crossed] = {}
        self._storage_bytes: list[int] = []
        self._maker_of: list[str] = []
        """storage -> the captured operator that makes it, or brings it to itself"""
        self._given: set[int] = set()
        self._kept: set[int] = set()
        self._own_bytes: dict[str, int] = {}

    @property
    def crossed(self) -> list[Crossed]:
        """Collectives of all reads, in order."""
        return list(self._crossed.values())

    def add_given(self, name: str, layout: TensorLayout, value: Tensor) -> None:
        """Add what exists before the step: a parameter, a buffer, a part of the batch."""
        number = self._add(TensorSpec(layout.local_shape(self._mesh, value.shape), value.dtype), name)
        self._given.add(self._values[number].storage)
        self._held[name, layout] = number

    def name_as(self, number: int, name: str, layout: TensorLayout) -> None:
        """Say that a value is a captured node's too."""
        self._held[name, layout] = number

    def add_results(
        self, name: str, layouts: Sequence[TensorLayout], value: Any, inputs: Sequence[int], work: LocalWork
    ) -> None:
        """Add what an operator gives, and note what it keeps for the backward pass.

        Args:
            layouts: of its results; none of an operator whose results are all whole.
            inputs: the values that it has read.
        """
        values = value if isinstance(value, list | tuple) else [value]
        tensors = [(index, each) for index, each in enumerate(values) if isinstance(each, Tensor)]
        made = []
        for place, (index, each) in enumerate(tensors):
            layout = layouts[index] if index < len(layouts) else TensorLayout.replicated(each.dim())
            spec = TensorSpec(layout.local_shape(self._mesh, each.shape), each.dtype)
            source = work.aliases.get(place)
            made.append(self._add(spec, name, self._values[inputs[source]].storage if source is not None else None))
        self._items[name] = made
        if made and layouts:
            self._held[name, layouts[0]] = made[0]
        self._kept |= {self._values[inputs[index]].storage for index in work.saved_inputs}
        self._kept |= {self._values[made[index]].storage for index in work.saved_results if index < len(made)}
        if work.saved_bytes:
            self._own_bytes[name] = work.saved_bytes

    def take_item(self, source: str, index: int, name: str, layout: TensorLayout) -> None:
        """Say that a captured node is one result of another."""
        if index < len(self._items[source]):
            self._held[name, layout] = self._items[source][index]
            self._items[name] = [self._items[source][index]]

    def read(self, read: Read, owner: Any, *, has_gradient: bool) -> int:
        """Return the value that a reader gets; collectives on its way are made once."""
        number = self._held[read.source, read.layout]
        for collective, layout in read.steps:
            number = self._pass(number, collective, owner, has_gradient=has_gradient)
            if layout is not None:
                self._held.setdefault((read.source, layout), number)
        return number

    def kept_bytes(self) -> dict[str, int]:
        """Return for every operator the bytes that are kept between the passes beside what exists before the step."""
        kept = dict(self._own_bytes)
        for key in sorted(self._kept - self._given):
            kept[self._maker_of[key]] = kept.get(self._maker_of[key], 0) + self._storage_bytes[key]
        return kept

    def _pass(self, number: int, collective: Collective, owner: Any, *, has_gradient: bool) -> int:
        key = (number, str(collective))
        if key in self._made:
            self._crossed[key].has_gradient |= has_gradient
            return self._made[key]
        value = self._values[number]
        self._crossed[key] = Crossed(owner, collective, value.spec, has_gradient)
        shape = result_shape(collective, value.spec.shape, self._mesh)
        result = self._add(TensorSpec(shape, value.spec.dtype), owner.name, self._memory_after(value, collective))
        self._made[key] = result
        self._kept |= {value.storage, self._values[result].storage}  # both outlive the segments that they stand between
        return result

    @staticmethod
    def _memory_after(value: _Value, collective: Collective) -> int | None:
        """Return the memory of a collective's result if it is its input's: rows of a tensor are."""
        is_rows = collective.kind == "slice" and math.prod(value.spec.shape[: collective.dim]) == 1
        return value.storage if collective.kind == "enter" or is_rows else None

    def _add(self, spec: TensorSpec, maker: str, storage: int | None = None) -> int:
        if storage is None:
            storage = len(self._storage_bytes)
            self._storage_bytes.append(spec.nbytes)
            self._maker_of.append(maker)
        self._values.append(_Value(spec, storage))
        return len(self._values) - 1


@dataclass(frozen=True)
class PricedMessage:
    """One message and how long it takes."""

    message: Message
    axes: Axes
    seconds: float


@dataclass
class OperatorPrice:
    """One operator, with the collectives that bring its inputs and those of its own."""

    name: str
    """Of its captured node; "results" and "buffers" for what leaves the graph."""
    module_path: str = ""
    forward_s: float = 0.0
    """Computing."""
    backward_s: float = 0.0
    forward_messages: list[PricedMessage] = field(default_factory=list)
    backward_messages: list[PricedMessage] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """All of it."""
        messages = (*self.forward_messages, *self.backward_messages)
        return self.forward_s + self.backward_s + sum(each.seconds for each in messages)


@dataclass(frozen=True)
class PriceSummary:
    """A price in a few numbers, for plans."""

    seconds: float
    """One training step, with nothing overlapped."""
    compute_s: float
    communication_s: float
    update_s: float
    parameter_bytes: int
    """At rest."""
    gathered_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    traffic_bytes: dict[str, int]
    """Operation -> bytes of its inputs on one rank."""

    @property
    def memory_bytes(self) -> int:
        """What the device must hold at the peak."""
        own = self.parameter_bytes + self.gathered_bytes + self.gradient_bytes + self.optimizer_bytes
        return own + self.activation_bytes

    @property
    def memory_text(self) -> str:
        """What of the memory is which, in MB."""
        kinds = {
            "parameters": self.parameter_bytes + self.gathered_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
        }
        return ", ".join(f"{name} {size / 2**20:.1f}" for name, size in kinds.items())

    def __str__(self) -> str:
        return (
            f"{self.seconds * 1e3:.3f} ms a step: computing {self.compute_s * 1e3:.3f}, messages "
            f"{self.communication_s * 1e3:.3f}, update {self.update_s * 1e3:.3f}; "
            f"{self.memory_bytes / 2**20:.1f} MB: {self.memory_text}"
        )


@dataclass(frozen=True)
class Price:
    """Seconds and bytes of one training step on one rank."""

    operators: tuple[OperatorPrice, ...]
    gathers: tuple[PricedMessage, ...]
    """Of parameters that are stored cut."""
    sums: tuple[PricedMessage, ...]
    """Of gradients of parameters."""
    update_s: float
    """The optimizer's step: it reads and writes parameters, gradients and state."""
    parameter_bytes: int
    """At rest."""
    gathered_bytes: int
    """Parameters that are stored cut, while operators read them."""
    gradient_bytes: int
    """As operators make them, before they are cut."""
    optimizer_bytes: int
    activation_bytes: int
    """Kept from the forward to the backward pass."""
    activations: Mapping[str, int] = field(default_factory=dict)
    """captured operator -> bytes of what it makes, or brings to itself, and is kept between the passes"""
    notes: tuple[str, ...] = ()

    @cached_property
    def compute_s(self) -> tuple[float, float]:
        """Forward and backward."""
        return sum(each.forward_s for each in self.operators), sum(each.backward_s for each in self.operators)

    @cached_property
    def communication_s(self) -> tuple[float, float]:
        """Forward, with gathers of parameters; and backward, with sums of gradients."""
        forward = [m for each in self.operators for m in each.forward_messages]
        backward = [m for each in self.operators for m in each.backward_messages]
        return sum(m.seconds for m in (*forward, *self.gathers)), sum(m.seconds for m in (*backward, *self.sums))

    @property
    def seconds(self) -> float:
        """The step, with nothing overlapped."""
        return sum(self.compute_s) + sum(self.communication_s) + self.update_s

    @property
    def memory_bytes(self) -> int:
        """What the device must hold at the peak."""
        own = self.parameter_bytes + self.gathered_bytes + self.gradient_bytes + self.optimizer_bytes
        return own + self.activation_bytes

    @property
    def traffic(self) -> Totals:
        """Every message of the step; parameters that run-time fuses into one message are counted one by one."""
        own = [m for each in self.operators for m in (*each.forward_messages, *each.backward_messages)]
        return Totals.of(each.message for each in (*own, *self.gathers, *self.sums))

    @property
    def summary(self) -> PriceSummary:
        """The price in a few numbers."""
        return PriceSummary(
            self.seconds,
            sum(self.compute_s),
            sum(self.communication_s),
            self.update_s,
            self.parameter_bytes,
            self.gathered_bytes,
            self.gradient_bytes,
            self.optimizer_bytes,
            self.activation_bytes,
            self.traffic.bytes,
        )


def price(
    captured: CapturedGraph,
    decisions: Decisions,
    device: DeviceProfile,
    step: StepSpec | None = None,
    *,
    rank: int | None = None,
    works: LocalWorks | None = None,
    flow: GradientFlow | None = None,
) -> Price:
    """Return the price of one training step of one part of the batch.

    Args:
        rank: only parts of halos differ between ranks; None: the mesh's first.
        works, flow: of the same graph and mesh, to be used again.
    """
    works = works or LocalWorks(decisions.mesh)
    flow = flow or GradientFlow(captured, works, decisions.differentiable_inputs)
    rank = decisions.mesh.first_rank if rank is None else rank
    return _Pricing(captured, decisions, device, step or StepSpec(), rank, works, flow).run()


class _Pricing:
    """One walk over the captured graph."""

    def __init__(
        self,
        captured: CapturedGraph,
        decisions: Decisions,
        device: DeviceProfile,
        step: StepSpec,
        rank: int,
        works: LocalWorks,
        flow: GradientFlow,
    ) -> None:
        self._captured = captured
        self._decisions = decisions
        self._mesh: Mesh = decisions.mesh
        self._device = device
        self._step = step
        self._rank = rank
        self._works = works
        self._flow = flow
        self._held = HeldValues(decisions.mesh)
        self._prices: list[OperatorPrice] = []
        self._moved: list[tuple[OperatorPrice, LocalCollective, bool]] = []
        """Collectives of operators themselves, with whether they come from computing."""
        self._rows: set[str] = set()
        """Placeholders of parameters whose gradient has rows alone."""
        self._filled: dict[tuple[str, Axes], int] = {}
        """Kind of messages of parameters -> bytes in the one that is open."""
        self._waited: set[bool] = set()
        """Whether gathers (True) and gradients have been waited for."""
        self._notes: dict[str, None] = {}

    def run(self) -> Price:
        for node in self._captured.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._operator(node, self._decisions.operators[node.name])
        results = self._begin("results", "")
        for read, value in zip(self._decisions.outputs, self._captured.outputs, strict=True):
            if isinstance(read, Read):
                self._read(read, results, has_gradient=value in self._flow.reached)
        buffers = self._begin("buffers", "")
        for read in self._decisions.buffer_updates.values():
            self._read(read, buffers, has_gradient=False)
        for entry in self._held.crossed:
            self._add_messages(entry.owner, LocalCollective(entry.collective, entry.value, entry.has_gradient))
        for owner, collective, waits in self._moved:
            self._add_messages(owner, collective, waits=waits)
        return self._with_parameters()

    # -- operators ----------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        value = node.meta["val"]
        if node.name in self._captured.parameters:
            name = self._captured.parameters[node.name]
            if self._decisions.placeholders[node.name] == node.name:
                self._held.add_given(node.name, self._decisions.parameters[name].layout, value)
        elif node.name in self._captured.inputs:
            layout = self._decisions.input_layouts[self._captured.inputs.index(node.name)]
            self._held.add_given(node.name, layout, value)
        else:
            self._held.add_given(node.name, TensorLayout.replicated(value.dim()), value)

    def _begin(self, name: str, path: str) -> OperatorPrice:
        self._prices.append(OperatorPrice(name, path))
        return self._prices[-1]

    def _operator(self, node: fx.Node, decision: OperatorDecision) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            self._held.take_item(source.name, index, node.name, decision.layouts[0])
            return
        call = operator_call(node)
        own = self._begin(node.name, call.module_path)
        is_reached = node in self._flow.reached
        tensors = [source for source in call.tensors if isinstance(source.meta.get("val"), Tensor)]
        if layout_constraint(node) is not None:
            (found,) = (self._read(read, own, has_gradient=is_reached) for read in decision.reads)
            self._held.name_as(found, node.name, decision.layouts[0])
            return
        rule = find_rule(node.target)
        is_whole = is_whole_operator(node, rule)
        rule = REPLICATED if rule is None or is_whole else rule
        form = rule.form(call)
        sources = list(dict.fromkeys(tensors)) if is_whole else tensors
        needed = [is_reached and source in self._flow.differentiable for source in sources]
        inputs = [self._read(read, own, has_gradient=need) for read, need in zip(decision.reads, needed, strict=True)]
        if is_whole:
            self._notes[f"{node.target} has several results and no rule: what it computes is not priced"] = None
            self._held.add_results(node.name, decision.layouts, node.meta.get("val"), inputs, LocalWork())
            return
        work = self._works.of(call, rule, form, decision.split, differentiable=needed, scatter=decision.scatter)
        if not work.is_known:
            self._notes[f"{node.target} needs values: its own messages and what it keeps are not priced"] = None
        own.forward_s, own.backward_s = work.compute_seconds(self._device)
        self._moved += [(own, collective, index == 0) for index, collective in enumerate(work.collectives)]
        self._rows |= {decision.reads[index].source for index in work.row_inputs}
        self._held.add_results(node.name, decision.layouts, node.meta.get("val"), inputs, work)

    def _read(self, read: Read, owner: OperatorPrice, *, has_gradient: bool) -> int:
        return self._held.read(read, owner, has_gradient=has_gradient)

    def _add_messages(self, owner: OperatorPrice, collective: LocalCollective, *, waits: bool = True) -> None:
        axes, copies = collective.collective.axes, collective.copies(self._mesh)
        own_s = [sum(copy_work(nbytes).seconds(self._device) for nbytes in each) for each in copies]
        owner.forward_s, owner.backward_s = owner.forward_s + own_s[0], owner.backward_s + own_s[1]
        for message, found in zip(
            collective.messages(self._mesh, self._rank), (owner.forward_messages, owner.backward_messages), strict=True
        ):
            if message is not None:
                found.append(self._priced(message, axes, waits=waits))

    def _priced(self, message: Message, axes: Axes, *, waits: bool) -> PricedMessage:
        seconds = message_seconds(message.operation, message.bytes, self._mesh, axes, self._device, waits=waits)
        return PricedMessage(message, axes, seconds)

    def _fused(self, message: Message, axes: Axes, stored: int) -> PricedMessage:
        """Return a message that travels with others of its kind: the first one of a bucket takes what a start takes.

        They travel while operators compute, so that a step waits for gathers once, and for gradients once.

        Args:
            stored: bytes of the parameter as this rank stores it.
        """
        key, limit = (message.operation, axes), self._step.bucket_bytes
        is_gather = message.operation == "all_gather"
        priced = self._priced(message, axes, waits=is_gather not in self._waited)
        self._waited.add(is_gather)
        if self._step.is_alone(stored):
            return priced
        filled = self._filled.get(key)
        if filled is None or (limit is not None and filled + stored > limit):
            self._filled[key] = stored
            return priced
        self._filled[key] = filled + stored
        empty = message_seconds(message.operation, 0, self._mesh, axes, self._device, waits=False)
        return PricedMessage(message, axes, max(0.0, priced.seconds - empty))

    # -- parameters ---------------------------------------------------------------------------------------------

    def _with_parameters(self) -> Price:
        gathers: list[PricedMessage] = []
        sums: list[PricedMessage] = []
        stored_bytes = gathered_bytes = gradient_bytes = optimizer_bytes = 0
        by_name: dict[str, list[fx.Node]] = {}
        for node in self._captured.graph.nodes:
            if node.op == "placeholder" and node.name in self._captured.parameters:
                by_name.setdefault(self._captured.parameters[node.name], []).append(node)
        for name, nodes in by_name.items():
            value, use = nodes[0].meta["val"], self._decisions.parameters[name]
            shards = self._step.shard_axes.get(name, ())
            used = TensorSpec(use.layout.local_shape(self._mesh, value.shape), value.dtype).nbytes
            stored = used // self._mesh.extent(shards)
            stored_bytes += stored
            if shards:
                gathered_bytes += used
                times = 2 if self._step.regathers else 1
                gathers += [
                    self._fused(gathers_of_parameter(stored, shards, self._mesh), shards, stored) for _ in range(times)
                ]
            if not value.requires_grad:
                continue
            optimizer_bytes += self._step.optimizer_states * stored
            if not any(node in self._flow.reached for node in nodes):
                continue
            gradient_bytes += used
            if nodes[0].name not in self._rows:
                size = self._step.summed_bytes(stored, value.dtype)
                for message, axes in sums_of_gradient(size, shards, use.partial_axes, self._mesh):
                    sums.append(self._fused(message, axes, stored))
        kept = self._held.kept_bytes()
        state = stored_bytes + gradient_bytes + optimizer_bytes
        return Price(
            tuple(self._prices),
            tuple(gathers),
            tuple(sums),
            (state + stored_bytes + optimizer_bytes) / self._device.memory_bandwidth,
            stored_bytes,
            gathered_bytes,
            gradient_bytes,
            optimizer_bytes,
            sum(kept.values()),
            kept,
            tuple(self._notes),
        )
