"""The first operator of a captured graph whose result is another one than in the network that runs as it is.

The network runs once more in one process, and everything that its operators read and give is kept. The local program
runs node by node. A captured operator is right if its value is among what was kept, or if one that reads it is: the
network may spell the same computation otherwise. Nothing here knows what an operator means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.execute.transfers import start_forward
from msrun.runtime.nn.random_stream import current_draw
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.parallel.verification.report import TOLERANCES
from msrun.runtime.sharding.layout import TensorLayout
from msrun.runtime.sharding.operators.rule import DRAW, PLACE, apply_collective, operator_call, user_line
from msrun.runtime.tensors.plain_tensors import plain

MOST_BYTES = 1 << 30
"""Kept of one run by default."""


class KeptValues(TorchDispatchMode):
    """Keeps what every operator reads and gives while it is on.

    Args:
        most_bytes: what is kept at most; what comes after it is not.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        super().__init__()
        self.by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        self.precisions: set[torch.dtype] = set()
        """Types of the numbers that operators read and give."""
        self._most_bytes = most_bytes
        self._nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        self._keep((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._keep(result)
        return result

    def _keep(self, values: Any) -> None:
        for value in pytree.tree_leaves(values):
            if not isinstance(value, Tensor):
                continue
            if value.dtype in TOLERANCES:
                self.precisions.add(value.dtype)
            if self._nbytes < self._most_bytes:
                self.by_shape.setdefault(tuple(value.shape), []).append(value.detach().clone())
                self._nbytes += value.numel() * value.element_size()


def find_first_operator(compiled: CompiledCall, root: nn.Module, inputs: Sequence[Tensor], kept: KeptValues) -> str:
    """Return the first operator that differs, in words; empty when none does on the way forward, or none can be told.

    All ranks call it together, with whole parameters in place and the random numbers of the call.

    Args:
        inputs: the tensors of the call on this rank.
        kept: of the network that runs as it is, on the whole batch.
    """
    if compiled.parts.total > 1:
        return ""
    program, graph = compiled.program, compiled.captured.graph
    nodes = [node for node in graph.nodes if node.name in program.values]
    values = _local_values(compiled, root, inputs)
    found = []
    for node in nodes:
        local, layout = program.values[node.name]
        if isinstance(value := values.get(local), Tensor) and isinstance(node.meta.get("val"), Tensor):
            found.append((node.name, _is_kept(value, layout, node.meta["val"].shape, compiled, kept.by_shape)))
    everywhere = [dict(of_rank) for of_rank in gather(found)]
    is_right = {name: all(of_rank.get(name, False) for of_rank in everywhere) for name, _ in found}
    reaches: set[fx.Node] = set()
    for node in reversed(nodes):
        if is_right.get(node.name) or any(user in reaches for user in node.users):
            reaches.add(node)
    wanted = _what_outputs_need(compiled)
    first = next((n for n in nodes if n in wanted and n.name in is_right and n not in reaches), None)
    return "" if first is None else _describe(first)


def _describe(node: fx.Node) -> str:
    call = operator_call(node)
    path = f" of {user_name(call.module_path)}" if call.module_path else ""
    line = f" ({where})" if (where := user_line(node)) else ""
    return f"{call.operator.removesuffix('.default')}{path}{line}"


def _what_outputs_need(compiled: CompiledCall) -> set[fx.Node]:
    """Return the operators that a result or a buffer's new value is made of."""
    todo = [
        n for n in (*compiled.captured.outputs, *compiled.captured.buffer_updates.values()) if isinstance(n, fx.Node)
    ]
    found = set(todo)
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return found


def _local_values(compiled: CompiledCall, root: nn.Module, inputs: Sequence[Tensor]) -> dict[fx.Node, Any]:
    """Return the value of every node of the local program, of this rank."""
    program, rank = compiled.program, world.get_rank()
    mesh = program.mesh
    parameters, buffers = dict(root.named_parameters()), dict(root.named_buffers())
    values: dict[fx.Node, Any] = dict(zip(program.inputs, (tensor.detach() for tensor in inputs), strict=True))
    for use in program.parameters.values():
        part = plain(parameters[use.name]).detach()[use.layout.slices(mesh, use.shape, rank)]
        values[use.node] = part.to(use.dtype)  # autocast reads it in fewer bits
    values |= {node: buffers[name].detach().clone() for name, node in program.buffers.items()}
    values |= {node: constant.clone() for node, constant in program.constants.values()}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node not in values:
            values[node] = _given(node.target, rank - mesh.first_rank)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.target is apply_collective:
                values[node] = start_forward(kwargs["collective"], args[0].clone(), mesh, rank).wait()
            else:
                values[node] = node.target(*args, **kwargs)
    return values


def _given(name: str, place: int) -> Tensor:
    """Return what an executor gives a program."""
    draw = current_draw.get()
    if name == PLACE:
        return torch.tensor(place)
    assert name == DRAW
    assert draw is not None
    return draw.key(0).to_tensor()


def _is_kept(
    value: Tensor,
    layout: TensorLayout,
    shape: Sequence[int],
    compiled: CompiledCall,
    kept: Mapping[tuple[int, ...], Sequence[Tensor]],
) -> bool:
    """Return whether a rank's part of a value is that of a value that was kept."""
    own = layout.slices(compiled.program.mesh, shape, world.get_rank())
    for whole in kept.get(tuple(shape), ()):
        part = whole[own]
        if part.shape == value.shape and _is_close(value, part):
            return True
    return False


def _is_close(value: Tensor, right: Tensor) -> bool:
    allowed = 10 * max(TOLERANCES.get(value.dtype, 0.0), TOLERANCES.get(right.dtype, 0.0))
    if not allowed:
        return value.dtype == right.dtype and torch.equal(value, right)
    scale = float(right.double().abs().nan_to_num(0, 0, 0).max()) if right.numel() else 0.0
    return torch.allclose(value.double(), right.double(), rtol=0.0, atol=allowed * scale, equal_nan=True)
