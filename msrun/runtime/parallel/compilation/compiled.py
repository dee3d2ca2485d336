"""CompiledCall: one network for one shape of input, captured, partitioned, cut and ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from msrun.errors import CaptureError
from msrun.runtime.graph.activations import ActivationEstimate, estimate_activations
from msrun.runtime.graph.capture import CapturedGraph
from msrun.runtime.graph.execute import Executor
from msrun.runtime.graph.gradients import GradientGroup
from msrun.runtime.graph.parameters import ParameterGroup, StoredParameter
from msrun.runtime.graph.partition import LocalProgram
from msrun.runtime.graph.regions import RecomputeSpec, Region, find_regions, parameters_of
from msrun.runtime.graph.segments import Segment, cut_segments
from msrun.runtime.layout import Axes, Mesh
from msrun.runtime.nn.dropout_stream import slices_of_batch
from msrun.runtime.parallel.batch.accumulation import check_loss, hand_out
from msrun.runtime.parallel.batch.parts import BatchParts, join_values
from msrun.runtime.parallel.parameters.fusion import group_parameters
from msrun.runtime.parallel.parameters.fusion_config import FusionConfig


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
    """Factor of every part's scalar results."""
    parts: BatchParts = field(default_factory=BatchParts)
    gradient_scale: float = 1.0
    """Factor of every part's gradient; other than `scale` only with micro batches."""
    regions: list[Region] = field(default_factory=list)
    """What is recomputed."""
    captured: CapturedGraph | None = None
    """What the program was made of, for `activations`."""

    def activations(self) -> ActivationEstimate:
        """Return what a rank keeps between the forward and the backward pass of one micro batch."""
        assert self.captured is not None
        return estimate_activations(
            self.captured,
            self.program,
            self.segments,
            self.executor.replays,
            self.executor.buffers,
            frozenset(stored.name for stored in self.stored),
            self.copies,
        )

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Run the local program with autograd: gradients reach the stored parameters by `backward()`."""
        parameters = [stored.parameter for stored in self.stored]
        way = _RunMicroBatches if self.parts.micro_batches > 1 else _RunProgram
        flat = way.apply(self, torch.is_grad_enabled(), len(tensors), *tensors, *parameters)
        return pytree.tree_unflatten(list(flat), self.output_spec)

    def merge(self, results: Sequence[Sequence[Sequence[Any]]]) -> list[Any]:
        """Join the results of micro batches and copies: scalars are added up with their factor, others joined along
        dimension 0."""
        in_order = self.parts.in_order(results)
        if len(in_order) == 1:
            return list(in_order[0])
        return [join_values(list(values), self.scale) for values in zip(*in_order, strict=True)]

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

    def gradients_of_loss(self, results: Sequence[Sequence[Any]]) -> list[dict[str, Tensor]]:
        """Return per copy the gradient that begins the backward pass of a micro batch."""
        losses = [check_loss(list(values)) for values in results]
        return [{self.program.outputs[0].name: torch.full_like(loss, self.gradient_scale)} for loss in losses]

    def join_input_gradients(self, gradients: Sequence[Sequence[Sequence[Tensor | None]]]) -> list[Tensor | None]:
        """Return the gradients of the user's tensors from those of micro batches and copies."""
        inputs: list[Tensor | None] = []
        for parts in zip(*self.parts.in_order(gradients), strict=True):
            given = [part for part in parts if part is not None]
            if given and not given[0].dim():  # every part got the same number
                inputs.append(torch.stack(given).sum())
            else:
                inputs.append(torch.cat(given) if given else None)
        return inputs


class _RunProgram(torch.autograd.Function):
    """The whole local program as one step of the user's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, compiled: CompiledCall, is_grad_enabled: bool, count: int, *tensors: Tensor
    ) -> tuple[Any, ...]:
        inputs = tensors[:count]
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        (batches,) = compiled.parts.split(inputs)
        (places,) = compiled.parts.places()
        with slices_of_batch(places, compiled.parts.total):
            step = compiled.executor.forward(batches, needs_grad=needs_grad)
        ctx.compiled, ctx.step, ctx.count = compiled, step, count
        results = compiled.merge([compiled.executor.results(step)])
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
        inputs = compiled.join_input_gradients([compiled.executor.input_gradients(step)])
        return (None, None, None, *inputs, *(by_name.get(stored.name) for stored in compiled.stored))


class _RunMicroBatches(torch.autograd.Function):
    """The local program for one micro batch after the other, each forward and backward, as one autograd step."""

    @staticmethod
    def forward(
        ctx: Any, compiled: CompiledCall, is_grad_enabled: bool, count: int, *tensors: Tensor
    ) -> tuple[Any, ...]:
        executor = compiled.executor
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        parameters = executor.begin()
        micro_batches = compiled.parts.split(tensors[:count])
        results: list[list[list[Any]]] = []
        of_inputs: list[list[list[Tensor | None]]] = []
        by_name: dict[str, Tensor] = {}
        for number, (batches, slices) in enumerate(zip(micro_batches, compiled.parts.places(), strict=True)):
            with slices_of_batch(slices, compiled.parts.total):
                step = executor.forward(batches, needs_grad=needs_grad, gathered=parameters)
            results.append(executor.results(step))
            if needs_grad:
                is_last = number == len(micro_batches) - 1
                by_name = executor.backward(step, compiled.gradients_of_loss(results[-1]), reduces=is_last)
                of_inputs.append(executor.input_gradients(step))
        if needs_grad:
            joined = compiled.join_input_gradients(of_inputs)
            ctx.gradients = [*joined, *(by_name.get(stored.name) for stored in compiled.stored)]
        merged = compiled.merge(results)
        ctx.mark_non_differentiable(*(value for value in merged[1:] if isinstance(value, Tensor)))
        return tuple(merged)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *hand_out(ctx, gradients[0])


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
    scatters: bool = False,
    parts: BatchParts | None = None,
    gradient_scale: float | None = None,
    fusion: FusionConfig | None = None,
    recompute: Mapping[str, RecomputeSpec] | None = None,
    sums_wide: bool = True,
    executor_class: type[Executor] = Executor,
) -> CompiledCall:
    """Group the parameters, cut the program into segments and make its executor.

    Args:
        regathers: cut parameters are gathered again for the backward pass (level3).
        scatters: between micro batches only the gradients of stored parts are kept (level2, level3).
        parts: copies and micro batches; None: `copies` only.
        gradient_scale: factor of a part's gradient; None: `scale`.
        recompute: module path -> how it is recomputed.
        sums_wide: gradients of 16 bits travel and are added up in float32.
        executor_class: what runs it.
    """
    order = _order_of_use(program)
    used = [(stored[name], program.parameters[name].partial_axes) for name in order]
    placeholders = [program.parameters[name].node.name for name in order]
    regions = find_regions(program, recompute or {})
    again = [region for region in regions if region.spec.parallel_optimizer_comm_recompute]
    regathered = set(order) if regathers else parameters_of(program, again)
    group_of: dict[str, int] = {}
    types = [program.parameters[name].dtype for name in order]
    groups = []
    gathers = group_parameters(used, "gather", fusion, regathered=regathered)
    for number, members in enumerate(_of_one_type(gathers, types)):
        group_of.update({placeholders[i]: number for i in members})
        own, names, axes = _group(used, placeholders, members)
        is_freed = bool(own[0].shard_axes) and own[0].name in regathered
        groups.append(ParameterGroup(own, names, axes, mesh, rank, is_freed, dtype=types[members[0]]))
    reduces = group_parameters(used, "reduce", fusion, regathered=regathered)
    gradient_groups = [
        GradientGroup(
            *_group(used, placeholders, members), mesh, rank, scatters, _sum_dtype(types[members[0]], sums_wide)
        )
        for members in _of_one_type(reduces, types)
        if used[members[0]][0].parameter.requires_grad
    ]
    region_of = {name: number for number, region in enumerate(regions) for name in region.nodes}
    segments = cut_segments(program, group_of, region_of)
    device_buffers = {node.name: buffers[name] for name, node in program.buffers.items()}
    device_buffers |= {name: constant for name, (_, constant) in program.constants.items()}
    executor = executor_class(
        program,
        segments,
        groups,
        mesh=mesh,
        rank=rank,
        buffers=device_buffers,
        gradient_groups=gradient_groups,
        regions=regions,
    )
    return CompiledCall(
        program,
        segments,
        executor,
        [item for item, _ in used if item.parameter.requires_grad],
        groups,
        captured.output_spec,
        copies,
        scale,
        parts or BatchParts((("copies", copies),)),
        scale if gradient_scale is None else gradient_scale,
        regions,
        captured,
    )


def _group(
    used: Sequence[tuple[StoredParameter, Axes]], placeholders: Sequence[str], members: Sequence[int]
) -> tuple[list[StoredParameter], list[str], Axes]:
    """Return the members of a group, their placeholders, and the axes along which their gradients are partial."""
    return [used[i][0] for i in members], [placeholders[i] for i in members], used[members[0]][1]


def _of_one_type(groups: Sequence[Sequence[int]], types: Sequence[torch.dtype]) -> list[list[int]]:
    """Cut groups further, so that the members of each are read in one type."""
    alike = [[[i for i in members if types[i] == dtype] for dtype in dict.fromkeys(types)] for members in groups]
    return [members for parts in alike for members in parts if members]


def _sum_dtype(dtype: torch.dtype, is_wide: bool) -> torch.dtype:
    """Return the type in which gradients are added up."""
    return torch.float32 if is_wide and dtype in (torch.float16, torch.bfloat16) else dtype


def _order_of_use(program: LocalProgram) -> list[str]:
    """Return the names of the parameters that operators read, in order of first use."""
    name_of = {use.node: name for name, use in program.parameters.items()}
    order: dict[str, None] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            order.update(dict.fromkeys(name_of[n] for n in node.all_input_nodes if n in name_of))
    return list(order)
