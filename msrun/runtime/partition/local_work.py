"""What one captured operator does on one rank when its dimensions are cut in a given way, found without computing.

Its rule writes the local operators and collectives into a graph of their own, which runs once on fake tensors with
autograd on. Calls that look alike (the layers of a stack) are looked at once.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.operators import TensorSpec, Work, backward_work, forward_work, is_attention
from msrun.runtime.partition.collective_messages import Message, backward_message, copied_bytes, forward_message
from msrun.runtime.partition.local_values import LocalValue, gradient_reaches, run_on_fakes
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes, Mesh
from msrun.runtime.sharding.operators.row_gradients import gives_rows
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
class LocalCollective:
    """One collective on the values of one rank."""

    collective: Collective
    value: TensorSpec
    """Its input."""
    has_gradient: bool
    """Whether a gradient comes back through it."""

    def messages(self, mesh: Mesh, rank: int) -> tuple[Message | None, Message | None]:
        """Return what moves forward and on the way back."""
        forward = forward_message(self.collective, self.value.shape, self.value.dtype, mesh, rank)
        if not self.has_gradient:
            return forward, None
        return forward, backward_message(self.collective, self.value.shape, self.value.dtype, mesh, rank)

    def copies(self, mesh: Mesh) -> tuple[list[int], list[int]]:
        """Return the bytes of the copies beside the messages, forward and on the way back."""
        forward, backward = copied_bytes(self.collective, self.value.shape, self.value.dtype, mesh)
        return forward, backward if self.has_gradient else []


@dataclass(frozen=True)
class LocalWork:
    """What one operator does on one rank."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    collectives: tuple[LocalCollective, ...] = ()
    """Those of the rule itself, such as the sum of partial products; not those that bring its inputs."""
    saved_inputs: frozenset[int] = frozenset()
    """Inputs that are kept for the backward pass."""
    saved_results: frozenset[int] = frozenset()
    saved_bytes: int = 0
    """Of what is neither an input nor a result."""
    aliases: Mapping[int, int] = field(default_factory=dict)
    """Result -> the input whose memory it is."""
    row_inputs: frozenset[int] = frozenset()
    """Inputs whose gradient has the rows alone that were looked up."""
    is_differentiable: bool = False
    """Whether some result has a gradient."""
    is_known: bool = True
    """False of an operator that needs values: then its collectives and what it keeps are not told."""

    def compute_seconds(self, device: DeviceProfile) -> tuple[float, float]:
        """Return how long it computes forward and on the way back."""
        return _seconds(self.forward, device), _seconds(self.backward, device)


def _seconds(works: Sequence[Work], device: DeviceProfile) -> float:
    return sum(work.seconds(device) + work.launches * device.overhead_s for work in works)


class LocalWorks:
    """Tells the work of operators on one mesh; equal questions are answered once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._known: dict[tuple[Any, ...], LocalWork] = {}
        self._signatures: dict[fx.Node, str] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def signature(self, node: fx.Node) -> str:
        """Return text that is equal for calls of one operator with equal arguments, shapes and types."""
        if node not in self._signatures:
            described = pytree.tree_map(
                lambda value: _Described(value.meta.get("val")) if isinstance(value, fx.Node) else value,
                (node.args, node.kwargs),
            )
            self._signatures[node] = f"{node.target} {described}"
        return self._signatures[node]

    def of(
        self,
        call: OperatorCall,
        rule: Rule,
        form: Form,
        split: LabelSplit,
        *,
        differentiable: Sequence[bool],
        scatter: tuple[int, Axes] | None = None,
    ) -> LocalWork:
        """Return the work of an operator.

        Args:
            split: the axes that cut each label of the form.
            differentiable: for each tensor input, whether a gradient flows to it in a step.
            scatter: dimension and axes that its sums are left cut by.
        """
        cut = tuple(sorted((label, axes) for label, axes in split.items() if axes))
        key = (self.signature(call.node), cut, tuple(differentiable), scatter)
        if key not in self._known:
            try:
                self._known[key] = self._run(call, rule, form, split, differentiable, scatter)
            except RuntimeError:  # an operator that needs values
                self._known[key] = self._by_shapes(call, form, split, differentiable)
        return self._known[key]

    def _run(
        self,
        call: OperatorCall,
        rule: Rule,
        form: Form,
        split: LabelSplit,
        differentiable: Sequence[bool],
        scatter: tuple[int, Axes] | None,
    ) -> LocalWork:
        graph = fx.Graph()
        inputs = [graph.placeholder(f"input_{index}") for index in range(len(call.tensors))]
        build = LocalBuilder(graph, self.mesh)
        build.scatter = scatter
        first = rule.lower(call, form, build, inputs, split)
        results = list(build.packed.get(first, {0: first}).values())
        run = _Run(self.mesh, graph, self._mode)
        given = self._inputs(call, form, split, scatter)
        run.run(dict(zip(inputs, given, strict=True)), differentiable)
        return run.found(inputs, results)

    def _inputs(
        self, call: OperatorCall, form: Form, split: LabelSplit, scatter: tuple[int, Axes] | None
    ) -> list[TensorSpec]:
        after = split_of_result(form, split, scatter)
        layouts = [
            form.layout_of_input(i, after if i in form.added else split, self.mesh) for i in range(len(form.inputs))
        ]
        values = [tensor.meta["val"] for tensor in call.tensors]
        return [TensorSpec(x.local_shape(self.mesh, v.shape), v.dtype) for x, v in zip(layouts, values, strict=True)]

    def _by_shapes(
        self, call: OperatorCall, form: Form, split: LabelSplit, differentiable: Sequence[bool]
    ) -> LocalWork:
        inputs = self._inputs(call, form, split, None)
        value = call.node.meta["val"]
        dtype = value.dtype if isinstance(value, Tensor) else inputs[0].dtype if inputs else torch.float32
        results = [TensorSpec(form.layout(form.output, split).local_shape(self.mesh, call.output_shape), dtype)]
        needed = [index for index, is_needed in enumerate(differentiable) if is_needed]
        target = call.node.target
        work = forward_work(target, inputs, results), backward_work(target, inputs, results, needed)
        passes = bool(needed) and has_gradient(dtype)
        return LocalWork((work[0],), (work[1],), is_differentiable=passes, is_known=False)


def has_gradient(dtype: torch.dtype) -> bool:
    """Return whether values of a type can have a gradient: real and complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


class _Described:
    """A tensor argument in a signature."""

    def __init__(self, value: Any) -> None:
        values = value if isinstance(value, list | tuple) else [value]
        self._text = " ".join(f"{tuple(v.shape)}{v.dtype}" if isinstance(v, Tensor) else str(v) for v in values)

    def __repr__(self) -> str:
        return self._text


def split_of_result(form: Form, split: LabelSplit, scatter: tuple[int, Axes] | None) -> LabelSplit:
    """Return the split with the axes by which a sum is left cut added to its dimension of the output."""
    if scatter is None:
        return split
    dim, axes = scatter
    label = form.output[dim]
    assert label is not None
    return {**split, label: (*split.get(label, ()), *axes)}


class _Run:
    """Runs the local graph of one operator on fake tensors."""

    def __init__(self, mesh: Mesh, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self._mesh = mesh
        self._mode = mode
        self._graph = graph
        self._values: dict[fx.Node, Any] = {}
        self._saved: list[Tensor] = []

    def run(self, given: Mapping[fx.Node, TensorSpec], differentiable: Sequence[bool]) -> None:
        def pack(tensor: Tensor) -> Tensor:
            self._saved.append(tensor)
            return tensor

        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        is_plain = _is_plain(self._graph, len(given))
        with contextlib.nullcontext() if is_plain else self._mode, torch.enable_grad(), saving:
            for (node, spec), is_needed in zip(given.items(), differentiable, strict=True):
                device = "meta" if is_plain else None
                self._values[node] = torch.empty(spec.shape, dtype=spec.dtype, device=device, requires_grad=is_needed)
            others = fake_given()
            for node in self._graph.nodes:
                if node.op == "placeholder" and node not in self._values:
                    self._values[node] = others[node.name]
                elif node.op == "call_function":
                    self._values[node] = run_on_fakes(node, self._values, self._mesh)

    @cached_property
    def _reached(self) -> set[fx.Node]:
        values = {
            node: LocalValue(tuple(v.shape), v.dtype, v.requires_grad)
            for node, v in self._values.items()
            if isinstance(v, Tensor)
        }
        ends = [node for node in reversed(self._graph.nodes) if not node.users]
        return gradient_reaches(ends, values)

    def found(self, inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> LocalWork:
        """Return what the run has shown."""
        forward, backward, collectives = [], [], []
        for node in self._graph.nodes:
            if (crossed := collective_of(node)) is not None:
                collectives.append(self._collective(node, crossed))
            if node.target is apply_collective:
                continue
            if node.op == "call_function" and node.target is not operator.getitem:
                given: list[fx.Node] = []
                fx.node.map_arg((node.args, node.kwargs), given.append)
                sources = [n for n in given if isinstance(self._values[n], Tensor)]
                specs = [_spec(self._values[n]) for n in sources]
                made = [_spec(value) for value in _tensors(self._values[node])]
                needed = [i for i, n in enumerate(sources) if self._values[n].requires_grad and node in self._reached]
                rounds = 1 if crossed is None else self._mesh.extent(crossed.axes)  # each with another rank's part
                forward.append(_times(forward_work(node.target, specs, made), rounds))
                backward.append(_times(backward_work(node.target, specs, made, needed), rounds))
        of_input = {_storage(self._values[n]): index for index, n in enumerate(inputs)}
        made_here = [v for result in results for v in _tensors(self._values[result])]
        of_result = {_storage(value): index for index, value in reversed(list(enumerate(made_here)))}
        saved = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in self._saved}
        for node in self._graph.nodes:
            if node.target is apply_collective:  # both sides of it outlive their segments
                for value in (self._values[node.args[0]], self._values[node]):
                    saved[_storage(value)] = value.untyped_storage().nbytes()
        return LocalWork(
            tuple(work for work in forward if work.launches),
            tuple(work for work in backward if work.launches),
            tuple(collectives),
            frozenset(of_input[key] for key in saved if key in of_input),
            frozenset(of_result[key] for key in saved if key in of_result and key not in of_input),
            sum(size for key, size in saved.items() if key not in of_input and key not in of_result),
            {index: of_input[_storage(value)] for index, value in enumerate(made_here) if _storage(value) in of_input},
            frozenset(i for i, n in enumerate(inputs) if any(gives_rows(user) for user in n.users)),
            any(value.requires_grad for value in made_here),
        )

    def _collective(self, node: fx.Node, collective: Collective) -> LocalCollective:
        source = cast(fx.Node, node.args[0])
        return LocalCollective(collective, _spec(self._values[source]), node in self._reached)


def _times(work: Work, rounds: int) -> Work:
    return work if rounds == 1 else replace(work, operations=work.operations * rounds)


def _is_plain(graph: fx.Graph, inputs: int) -> bool:
    """Return whether the meta device, which is many times faster, tells the same as fake tensors: of torch's own
    operators on inputs alone; attention takes another kernel there, and what names a device is made on it."""
    if not inputs or sum(node.op == "placeholder" for node in graph.nodes) != inputs:
        return False
    for node in graph.nodes:
        if node.op == "placeholder" or node.target is apply_collective or node.target is operator.getitem:
            continue
        is_torchs = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
        names_device = any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values()))
        if not is_torchs or is_attention(node.target) or names_device:
            return False
    return True


def _spec(value: Tensor) -> TensorSpec:
    return TensorSpec(tuple(value.shape), value.dtype)


def _tensors(value: Any) -> list[Tensor]:
    return [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, Tensor)]


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata
