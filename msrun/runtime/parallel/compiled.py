"""CompiledCall: one network for one shape of input, captured, partitioned, cut and ready to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from msrun.errors import CaptureError
from msrun.runtime.graph.capture import CapturedGraph
from msrun.runtime.graph.execute import Executor
from msrun.runtime.graph.parameters import ParameterGroup, StoredParameter
from msrun.runtime.graph.partition import LocalProgram
from msrun.runtime.graph.segments import Segment, cut_segments
from msrun.runtime.layout import Mesh
from msrun.runtime.nn.dropout_stream import slices_of_batch
from msrun.runtime.parallel.fusion import group_parameters
from msrun.runtime.parallel.micro_batch import split_batch


@dataclass
class CompiledCall:
    """Runs one captured call. Made by AutoParallel; lives as long as it."""

    program: LocalProgram
    segments: list[Segment]
    executor: Executor
    stored: list[StoredParameter]
    """Trainable parameters that the program uses: their gradients come back in this order."""
    groups: list[ParameterGroup]
    output_spec: pytree.TreeSpec
    copies: int
    scale: float
    """Factor of every copy's scalar results."""

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Run the local program with autograd: gradients reach the stored parameters by `backward()`."""
        parameters = [stored.parameter for stored in self.stored]
        flat = _RunProgram.apply(self, torch.is_grad_enabled(), len(tensors), *tensors, *parameters)
        return pytree.tree_unflatten(list(flat), self.output_spec)

    def merge(self, results: Sequence[Sequence[Any]]) -> list[Any]:
        """Join the copies' results: scalars are added up with their factor, others joined along dimension 0."""
        if self.copies == 1:
            return list(results[0])
        merged: list[Any] = []
        for values in zip(*results, strict=True):
            if not isinstance(values[0], Tensor):
                merged.append(values[0])
            elif values[0].dim() == 0:
                merged.append(torch.stack(values).sum() * self.scale)
            else:
                merged.append(torch.cat(list(values)))
        return merged

    def gradients_of_copies(self, gradients: Sequence[Tensor | None]) -> list[dict[str, Tensor]]:
        """Return per copy the gradient of every result, by its name in the local graph."""
        copies: list[dict[str, Tensor]] = [{} for _ in range(self.copies)]
        for value, gradient in zip(self.program.outputs, gradients, strict=True):
            if gradient is None or not isinstance(value, fx.Node):
                continue
            parts = [gradient * self.scale] * self.copies if gradient.dim() == 0 else gradient.chunk(self.copies)
            for copy, part in zip(copies, parts, strict=True):
                copy[value.name] = copy[value.name] + part if value.name in copy else part
        return copies


class _RunProgram(torch.autograd.Function):
    """The whole local program as one step of the user's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, compiled: CompiledCall, is_grad_enabled: bool, count: int, *tensors: Tensor
    ) -> tuple[Any, ...]:
        inputs = tensors[:count]
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        batches = split_batch(inputs, compiled.copies)
        with slices_of_batch(range(compiled.copies), compiled.copies):
            step = compiled.executor.forward(batches, needs_grad=needs_grad)
        ctx.compiled, ctx.step, ctx.count = compiled, step, count
        results = compiled.merge(compiled.executor.results(step))
        fixed = [value for value in results if isinstance(value, Tensor) and not value.is_floating_point()]
        ctx.mark_non_differentiable(*fixed)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        compiled: CompiledCall = ctx.compiled
        if ctx.step is None:
            raise CaptureError("backward() was called twice on one loss: call the network again for another backward")
        step, ctx.step = ctx.step, None
        with torch.enable_grad():
            by_name = compiled.executor.backward(step, compiled.gradients_of_copies(gradients))
        per_copy = compiled.executor.input_gradients(step)
        inputs: list[Tensor | None] = []
        for parts in zip(*per_copy, strict=True):
            given = [part for part in parts if part is not None]
            if given and not given[0].dim():  # every copy got the same number
                inputs.append(torch.stack(given).sum())
            else:
                inputs.append(torch.cat(given) if given else None)
        return (None, None, None, *inputs, *(by_name.get(stored.name) for stored in compiled.stored))


def build_compiled_call(
    captured: CapturedGraph,
    program: LocalProgram,
    stored: dict[str, StoredParameter],
    buffers: dict[str, Tensor],
    *,
    mesh: Mesh,
    rank: int,
    copies: int,
    scale: float,
    regathers: bool,
) -> CompiledCall:
    """Group the parameters, cut the program into segments and make its executor."""
    order = _order_of_use(program)
    used = [(stored[name], program.parameters[name].partial_axes) for name in order]
    groups = []
    group_of: dict[str, int] = {}
    for number, members in enumerate(group_parameters(used)):
        placeholders = [program.parameters[order[i]].node.name for i in members]
        group_of.update(dict.fromkeys(placeholders, number))
        members_stored = [used[i][0] for i in members]
        is_cut = bool(members_stored[0].shard_axes)
        groups.append(
            ParameterGroup(members_stored, placeholders, used[members[0]][1], mesh, rank, regathers and is_cut)
        )
    segments = cut_segments(program, group_of)
    device_buffers = {node.name: buffers[name] for name, node in program.buffers.items()}
    device_buffers |= {name: constant for name, (_, constant) in program.constants.items()}
    executor = Executor(program, segments, groups, mesh=mesh, rank=rank, buffers=device_buffers)
    trainable = [item for item, _ in used if item.parameter.requires_grad]
    return CompiledCall(program, segments, executor, trainable, groups, captured.output_spec, copies, scale)


def _order_of_use(program: LocalProgram) -> list[str]:
    """Return the names of the parameters that operators read, in order of first use."""
    name_of = {use.node: name for name, use in program.parameters.items()}
    order: dict[str, None] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            order.update(dict.fromkeys(name_of[n] for n in node.all_input_nodes if n in name_of))
    return list(order)
