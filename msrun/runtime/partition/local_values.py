"""Shapes of the local program: what every value of it will be on this rank, found without computing any.

The program runs once on fake tensors with autograd on, so which values carry a gradient is what it will be in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from msrun.runtime.partition.collective_messages import result_shape
from msrun.runtime.partition.program import ORIGIN, LocalProgram
from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Mesh, TensorLayout
from msrun.runtime.sharding.operators.rule import apply_collective, fake_given


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
