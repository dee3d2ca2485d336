"""The events of a training step on one rank: every operator and collective of its local program, told once.

Each local operator is run on tensors without values, with autograd on; calls that look alike (the layers of a stack)
are run once. What came out of it says for every value its size, its memory and whether it has a gradient, and for
every operator what it computes, what it sends and what it keeps for the backward pass. Prices, traffic, activations
and what moves to the host are sums over these events.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.operators import NOTHING, TensorSpec, Work, backward_work, forward_work, has_device_kernels
from msrun.runtime.partition.collective_messages import LocalCollective, result_shape
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Mesh, TensorLayout
from msrun.runtime.sharding.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    apply_collective,
    collective_of,
    fake_given,
)


@dataclass(frozen=True)
class LocalValue:
    """What a value of the local program is on one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...]
    device: torch.device
    storage: int
    """Number of its memory, which views of it share."""

    @property
    def nbytes(self) -> int:
        """Bytes of one such tensor."""
        return self.spec.nbytes

    @cached_property
    def spec(self) -> TensorSpec:
        """Its shape and type."""
        return TensorSpec(self.shape, self.dtype)

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What is equal for values of which operators make the same."""
        return self.shape, self.dtype, self.requires_grad, self.stride, self.device


LocalValues = Mapping[fx.Node, LocalValue]
"""Every tensor of a local program."""


@dataclass(frozen=True)
class Event:
    """One local operator or collective."""

    node: fx.Node
    forward: Work
    backward: Work
    """Where a gradient comes back to it."""
    saved: frozenset[int]
    """Memory that is kept for the backward pass."""
    crossing: tuple[Collective, TensorSpec] | None = None
    """The collective that it is, or runs inside, and its input."""


@dataclass(frozen=True)
class Storage:
    """Memory that values of a step have in common."""

    nbytes: int
    maker: fx.Node
    """What takes it."""


@dataclass
class StepEvents:
    """The events of one training step of a program, with its values."""

    program: LocalProgram
    values: dict[fx.Node, LocalValue]
    events: list[Event]
    storages: list[Storage]
    given: Set[int]
    """Memory that is there before the step: parameters, buffers, the batch."""

    @cached_property
    def reached(self) -> set[fx.Node]:
        """The values that a gradient comes back to.

        Gradients enter at the loss: the first result that is a scalar with a gradient, or else every result with one.
        """
        results = [n for n in self.program.outputs if isinstance(n, fx.Node) and self.values[n].requires_grad]
        loss = [node for node in results if not self.values[node].shape][:1]
        return gradient_reaches(loss or results, self.values)

    @property
    def parameter_memory(self) -> dict[str, str]:
        """For every value that is a parameter or a view of it that parameter's placeholder, both by name."""
        owners = {self.values[use.node].storage: use.node.name for use in self.program.parameters.values()}
        return {n.name: owners[value.storage] for n, value in self.values.items() if value.storage in owners}

    def crossing(self, event: Event) -> LocalCollective:
        """Return the collective of an event."""
        assert event.crossing is not None
        return LocalCollective(*event.crossing, has_gradient=event.node in self.reached)


def tell(program: LocalProgram, operators: Operators | None = None) -> StepEvents:
    """Return the events of a training step of a program.

    Args:
        operators: what is known of other programs' operators on the same mesh.

    Raises:
        RuntimeError: an operator needs values, which only a run has.
    """
    run = _Run(operators or Operators(program.mesh))
    for use in program.parameters.values():
        run.give_part(use.node, use.layout, requires_grad=use.node.meta["val"].requires_grad)
    for index, (node, layout) in enumerate(zip(program.inputs, program.input_layouts, strict=True)):
        run.give_part(node, layout, requires_grad=index in program.differentiable_inputs)
    for node in [*program.buffers.values(), *(node for node, _ in program.constants.values())]:
        run.give_part(node, TensorLayout.replicated(node.meta["val"].dim()), requires_grad=False)
    run.give_by_executor(program.graph)
    given = frozenset(range(len(run.storages)))
    run.run(program.graph)
    values = {node: value for node, value in run.values.items() if isinstance(value, LocalValue)}
    return StepEvents(program, values, run.events, run.storages, given)


def gradient_reaches(results: Iterable[fx.Node], values: LocalValues) -> set[fx.Node]:
    """Return the values, parameters included, that gradients of these results flow back to."""
    reached: set[fx.Node] = set()
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node in reached or (node in values and not values[node].requires_grad):
            continue
        reached.add(node)
        waiting += node.all_input_nodes
    return reached


@dataclass(frozen=True)
class _Done:
    """What one operator has made of values of some kinds; memory is numbered from its inputs on."""

    results: Any
    """Its results, with `LocalValue` in place of tensors."""
    made: tuple[int, ...]
    """Bytes of new memory."""
    saved: frozenset[int]
    forward: Work
    backward: Work


class Operators:
    """What operators make of values on one mesh; equal calls are run once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._known: dict[Hashable, _Done] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def done(self, node: fx.Node, values: Mapping[fx.Node, Any], given: Sequence[LocalValue]) -> _Done:
        """Return what a local operator makes of these values.

        Args:
            given: the tensors among its arguments, in order.
        """
        key = node.target, collective_of(node), _frozen((node.args, node.kwargs), values.__getitem__)
        found = self._known.get(key)
        if found is None:
            try:
                found = self._run(node, values, given, is_plain=_is_plain(node, given))
            except RuntimeError:  # the meta device has no such operator
                found = self._run(node, values, given, is_plain=False)
            self._known[key] = found
        return found

    def _run(
        self, node: fx.Node, values: Mapping[fx.Node, Any], given: Sequence[LocalValue], *, is_plain: bool
    ) -> _Done:
        inputs: list[Tensor] = []
        saved: list[Tensor] = []

        def fake(value: LocalValue) -> Tensor:
            device = "meta" if is_plain else "cpu" if value.device.type == "meta" else value.device
            made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
            inputs.append(made.requires_grad_(value.requires_grad))
            return inputs[-1]

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with contextlib.nullcontext() if is_plain else self._mode, torch.enable_grad(), saving:
            filled: Any = fx.node.map_arg(
                (node.args, node.kwargs), lambda n: pytree.tree_map_only(LocalValue, fake, values[n])
            )
            args, kwargs = filled
            if node.target is apply_collective:
                result: Any = _cross(args[0], kwargs["collective"], self.mesh)
                saved += [args[0], result]  # both sides outlive the segments that they stand between
            else:
                result = cast("Callable[..., Any]", node.target)(*args, **kwargs)
        numbers = {_address(tensor): number for number, tensor in reversed(list(enumerate(inputs)))}
        made: list[int] = []

        def number(tensor: Tensor) -> int:
            if _address(tensor) not in numbers:
                numbers[_address(tensor)] = len(inputs) + len(made)
                made.append(tensor.untyped_storage().nbytes())
            return numbers[_address(tensor)]

        def value(tensor: Tensor) -> LocalValue:
            device = given[0].device if is_plain else tensor.device
            shape, stride = tuple(tensor.shape), tensor.stride()
            return LocalValue(shape, tensor.dtype, tensor.requires_grad, stride, device, number(tensor))

        results = pytree.tree_map_only(Tensor, value, result)
        kept = frozenset(map(number, saved))
        specs = [each.spec for each in _tensors(results)]
        needed = [index for index, each in enumerate(given) if each.requires_grad]
        return _Done(results, tuple(made), kept, *self._works(node, [each.spec for each in given], specs, needed))

    def _works(
        self, node: fx.Node, inputs: Sequence[TensorSpec], results: Sequence[TensorSpec], needed: Sequence[int]
    ) -> tuple[Work, Work]:
        if node.target is apply_collective:
            return NOTHING, NOTHING
        works = forward_work(node.target, inputs, results), backward_work(node.target, inputs, results, needed)
        inside = collective_of(node)
        if inside is None:
            return works
        rounds = self.mesh.extent(inside.axes)  # each with another rank's part
        forward, backward = (replace(work, operations=work.operations * rounds) for work in works)
        return forward, backward


class _Run:
    """Runs a local graph operator by operator."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self.values: dict[fx.Node, Any] = {}
        """node -> `LocalValue`, a list of them, or a number"""
        self.events: list[Event] = []
        self.storages: list[Storage] = []

    def give(self, node: fx.Node, shape: Sequence[int], dtype: torch.dtype, device: Any, *, requires_grad: bool) -> int:
        """Give a placeholder new memory; returns its number."""
        empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
        number = len(self.storages)
        self.storages.append(Storage(empty.untyped_storage().nbytes(), node))
        self.values[node] = LocalValue(tuple(shape), dtype, requires_grad, empty.stride(), device, number)
        return number

    def give_part(self, node: fx.Node, layout: TensorLayout, *, requires_grad: bool) -> None:
        """Give a placeholder this rank's part of what was captured."""
        value = node.meta["val"]
        shape = layout.local_shape(self._operators.mesh, value.shape)
        self.give(node, shape, value.dtype, value.device, requires_grad=requires_grad)

    def give_by_executor(self, graph: fx.Graph) -> None:
        """Give what the executor gives."""
        others = fake_given()
        for node in graph.nodes:
            if node.op == "placeholder" and node.name in others and node not in self.values:
                other = others[node.name]
                self.give(node, other.shape, other.dtype, other.device, requires_grad=False)

    def run(self, graph: fx.Graph) -> None:
        """Run a graph whose placeholders have been given."""
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem and isinstance(self.values.get(node.args[0]), list | tuple):
                self.values[node] = self.values[node.args[0]][node.args[1]]
                continue
            given = _values_of(node, self.values)
            self._add(node, self._operators.done(node, self.values, given), given)

    def _add(self, node: fx.Node, done: _Done, given: Sequence[LocalValue]) -> None:
        first = len(self.storages) - len(given)

        def number(own: int) -> int:
            return given[own].storage if own < len(given) else first + own

        self.values[node] = pytree.tree_map_only(
            LocalValue, lambda value: replace(value, storage=number(value.storage)), done.results
        )
        self.storages += [Storage(nbytes, node) for nbytes in done.made]
        collective = collective_of(node)
        crossing = None if collective is None else (collective, self.values[cast(fx.Node, node.args[0])].spec)
        saved = frozenset(map(number, done.saved))
        self.events.append(Event(node, done.forward, done.backward, saved, crossing))


def _values_of(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[LocalValue]:
    """Return the tensors among the arguments of a node, in order."""
    sources: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), sources.append)
    return [value for source in sources for value in _tensors(values.get(source))]


def _tensors(value: Any) -> list[LocalValue]:
    return [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, LocalValue)]


def _frozen(value: Any, value_of: Callable[[fx.Node], Any]) -> Hashable:
    """Return what is equal for arguments of which an operator makes the same."""
    if isinstance(value, fx.Node):
        value = value_of(value)
    if isinstance(value, LocalValue):
        return value.kind
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_frozen(each, value_of) for each in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(each, value_of)) for name, each in value.items())
    return type(value), value


def _is_plain(node: fx.Node, given: Sequence[LocalValue]) -> bool:
    """Return whether the meta device, which is many times faster, tells the same as fake tensors: of torch's own
    operators on tensors; some take another kernel there, and what names a device is made on it."""
    if node.target is apply_collective:
        return True
    is_torchs = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
    names_device = any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values()))
    return bool(given) and is_torchs and not has_device_kernels(node.target) and not names_device


def _cross(value: Tensor, collective: Collective, mesh: Mesh) -> Tensor:
    """Return a fake tensor like the result of a collective: its size and memory, a gradient where the value has one."""
    found = value.detach()
    if collective.kind == "slice":  # rows of a tensor are its memory
        own, *_ = found.chunk(mesh.extent(collective.axes), collective.dim)
        found = own.contiguous()
    elif collective.kind != "enter":
        found = found.new_empty(result_shape(collective, value.shape, mesh))
    return found.requires_grad_(value.requires_grad)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class LocalWork:
    """What one captured operator does on one rank when its dimensions are cut in a given way."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    collectives: tuple[LocalCollective, ...] = ()
    """Those of the rule itself, such as the sum of partial products; not those that bring its inputs."""
    saved_bytes: int = 0
    """Of what it keeps that is neither an input nor a result."""
    is_alias: bool = False
    """Whether some result is the memory of an input."""

    def compute_seconds(self, device: DeviceProfile) -> tuple[float, float]:
        """Return how long it computes forward and on the way back."""
        return work_seconds(self.forward, device), work_seconds(self.backward, device)


def work_seconds(works: Iterable[Work], device: DeviceProfile) -> float:
    """Return how long operators take one after the other, with what their caller needs to start them."""
    return sum(work.seconds(device) + work.launches * device.overhead_s for work in works)


class LocalWorks:
    """Tells the work of captured operators on one mesh, whatever cuts them; equal questions are answered once."""

    def __init__(self, mesh: Mesh, operators: Operators | None = None) -> None:
        self.mesh = mesh
        self._operators = operators or Operators(mesh)
        self._known: dict[tuple[Any, ...], LocalWork] = {}
        self._signatures: dict[fx.Node, Hashable] = {}

    def signature(self, node: fx.Node) -> Hashable:
        """Return what is equal for calls of one operator with equal arguments, shapes and types."""
        if node not in self._signatures:
            self._signatures[node] = node.target, _frozen((node.args, node.kwargs), lambda n: n.meta.get("val"))
        return self._signatures[node]

    def of(
        self, call: OperatorCall, rule: Rule, form: Form, split: LabelSplit, *, differentiable: Sequence[bool]
    ) -> LocalWork:
        """Return the work of an operator.

        Args:
            split: the axes that cut each label of the form.
            differentiable: for each tensor input, whether a gradient flows to it in a step.
        """
        cut = tuple(sorted((label, axes) for label, axes in split.items() if axes))
        key = (self.signature(call.node), cut, tuple(differentiable))
        if key not in self._known:
            self._known[key] = self._run(call, rule, form, split, differentiable)
        return self._known[key]

    def _run(
        self, call: OperatorCall, rule: Rule, form: Form, split: LabelSplit, differentiable: Sequence[bool]
    ) -> LocalWork:
        graph, run = fx.Graph(), _Run(self._operators)
        inputs = [graph.placeholder(f"input_{index}") for index in range(len(call.tensors))]
        build = LocalBuilder(graph, self.mesh)
        first = rule.lower(call, form, build, inputs, split)
        for node, spec, is_needed in zip(inputs, self._inputs(call, form, split), differentiable, strict=True):
            run.give(node, spec.shape, spec.dtype, torch.device("cpu"), requires_grad=is_needed)
        run.give_by_executor(graph)
        run.run(graph)
        ends = [node for node in reversed(graph.nodes) if not node.users]
        reached = gradient_reaches(ends, {n: v for n, v in run.values.items() if isinstance(v, LocalValue)})
        made = {v.storage for node in build.packed.get(first, {0: first}).values() for v in _tensors(run.values[node])}
        given = set(range(len(inputs)))
        saved = frozenset[int]().union(*(event.saved for event in run.events)) - given - made
        return LocalWork(
            tuple(event.forward for event in run.events if event.forward.launches),
            tuple(e.backward for e in run.events if e.backward.launches and e.node in reached),
            tuple(LocalCollective(*e.crossing, e.node in reached) for e in run.events if e.crossing is not None),
            sum(run.storages[number].nbytes for number in saved),
            bool(made & given),
        )

    def _inputs(self, call: OperatorCall, form: Form, split: LabelSplit) -> list[TensorSpec]:
        layouts = [form.layout_of_input(index, split, self.mesh) for index in range(len(form.inputs))]
        values = [tensor.meta["val"] for tensor in call.tensors]
        return [TensorSpec(x.local_shape(self.mesh, v.shape), v.dtype) for x, v in zip(layouts, values, strict=True)]


def has_gradient(dtype: torch.dtype) -> bool:
    """Return whether values of a type can have a gradient: real and complex numbers."""
    return dtype.is_floating_point or dtype.is_complex
