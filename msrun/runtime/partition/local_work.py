"""What one captured operator does on one rank when its dimensions are cut in a given way, found without computing.

Its rule writes the local operators and collectives into a graph of their own, which runs once on fake tensors with
autograd on. Calls that look alike (the layers of a stack) are looked at once.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.cost.operators import TensorSpec, Work, backward_work, forward_work, is_attention
from msrun.runtime.partition.collective_messages import (
    Message,
    backward_message,
    copied_bytes,
    forward_message,
    result_shape,
)
from msrun.runtime.partition.program import ORIGIN, LocalProgram
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes, Mesh, TensorLayout
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
from msrun.runtime.sharding.operators.table_lookup import gives_rows


@dataclass(frozen=True)
class LocalValue:
    """What a value of the local program is on one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    memory_of: str | None = None
    """The parameter, by its placeholder, whose memory it is: it is that parameter or a view of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of one such tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


LocalValues = Mapping[fx.Node, LocalValue]
"""Every tensor of a local program."""


def infer_local_values(
    program: LocalProgram, *, trainable: Mapping[str, bool], differentiable_inputs: frozenset[int]
) -> dict[fx.Node, LocalValue]:
    """Return what every tensor of the program is; values that are no tensors are left out.

    Args:
        trainable: parameter name -> whether it requires a gradient.
        differentiable_inputs: indexes of the user's tensors that require one.
    """
    values: dict[fx.Node, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        for name, use in program.parameters.items():
            values[use.node] = _empty(use.node, use.layout, program.mesh, requires_grad=trainable[name])
        for index, (node, layout) in enumerate(zip(program.inputs, program.input_layouts, strict=True)):
            values[node] = _empty(node, layout, program.mesh, requires_grad=index in differentiable_inputs)
        for node in [*program.buffers.values(), *(node for node, _ in program.constants.values())]:
            whole = TensorLayout.replicated(node.meta[ORIGIN].meta["val"].dim())
            values[node] = _empty(node, whole, program.mesh, requires_grad=False)
        given = fake_given()
        values |= {node: given[node.name] for node in program.graph.nodes if node.name in given}
        for node in program.graph.nodes:
            if node.op == "call_function":
                values[node] = run_on_fakes(node, values, program.mesh)
    owners = {_storage(values[use.node]): use.node.name for use in program.parameters.values()}
    return {
        node: LocalValue(tuple(value.shape), value.dtype, value.requires_grad, owners.get(_storage(value)))
        for node, value in values.items()
        if isinstance(value, Tensor)
    }


def local_values(program: LocalProgram) -> LocalValues:
    """Return what every tensor of a training step is: its parameters are trained as the captured network's are."""
    trainable = {name: use.node.meta["val"].requires_grad for name, use in program.parameters.items()}
    return infer_local_values(program, trainable=trainable, differentiable_inputs=program.differentiable_inputs)


def parameter_memory(values: Mapping[fx.Node, LocalValue]) -> dict[str, str]:
    """Return for every value that is a parameter's memory that parameter, both by name."""
    return {node.name: value.memory_of for node, value in values.items() if value.memory_of is not None}


def nodes_with_gradient(program: LocalProgram, values: LocalValues) -> set[fx.Node]:
    """Return the values that a gradient comes back to in a training step.

    Gradients enter at the loss: the first result that is a scalar with a gradient, or else every result with one.
    """
    results = [node for node in program.outputs if isinstance(node, fx.Node) and values[node].requires_grad]
    return gradient_reaches([node for node in results if not values[node].shape][:1] or results, values)


def gradient_reaches(results: Iterable[fx.Node], values: Mapping[fx.Node, LocalValue]) -> set[fx.Node]:
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


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _empty(node: fx.Node, layout: TensorLayout, mesh: Mesh, *, requires_grad: bool) -> Tensor:
    given = node.meta[ORIGIN].meta["val"]
    shape = layout.local_shape(mesh, given.shape)
    return torch.empty(shape, dtype=given.dtype, device=given.device, requires_grad=requires_grad)


def run_on_fakes(node: fx.Node, values: Mapping[fx.Node, Any], mesh: Mesh) -> Any:
    """Return what one local operator or collective makes of fake tensors."""
    filled: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    args, kwargs = filled
    if node.target is apply_collective:
        return cross_on_fakes(args[0], kwargs["collective"], mesh)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def cross_on_fakes(value: Tensor, collective: Collective, mesh: Mesh) -> Tensor:
    """Return a fake tensor like the result of a collective: its size and memory, a gradient where the value has one."""
    found = value.detach()
    if collective.kind == "slice":  # rows of a tensor are its memory
        length = value.shape[collective.dim] // mesh.extent(collective.axes)
        found = found.narrow(collective.dim, 0, length).contiguous()
    elif collective.kind != "enter":
        found = found.new_empty(result_shape(collective, value.shape, mesh))
    return found.requires_grad_(value.requires_grad)


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
