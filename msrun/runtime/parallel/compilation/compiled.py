"""CompiledCall: one network for one shape of input, captured, partitioned, cut and ready to run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from msrun.runtime.graph.activations import ActivationEstimate, estimate_activations
from msrun.runtime.graph.capture import CapturedGraph
from msrun.runtime.graph.execute import Executor
from msrun.runtime.graph.gradients import GradientGroup
from msrun.runtime.graph.late_weights import count_delayed, delay_weights
from msrun.runtime.graph.parameters import ParameterGroup, StoredParameter
from msrun.runtime.graph.partition import LocalProgram
from msrun.runtime.graph.regions import Region, find_regions, parameters_of
from msrun.runtime.graph.segments import Segment, cut_segments
from msrun.runtime.graph.step import ValueOnItsWay, arrived, full_like
from msrun.runtime.layout import Axes, Mesh
from msrun.runtime.parallel.batch.accumulation import check_loss
from msrun.runtime.parallel.batch.parts import BatchParts, join_values
from msrun.runtime.parallel.compilation.autograd_steps import RunMicroBatches, RunProgram
from msrun.runtime.parallel.compilation.run_spec import RunSpec
from msrun.runtime.parallel.late_loss import LateLoss
from msrun.runtime.parallel.parameters.fusion import Way, group_parameters
from msrun.runtime.parallel.scaling import Scales, current_loss_scale


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
    parts: BatchParts
    scales: Scales
    """Factors of every part's scalar results and of its gradient; they differ only with micro batches."""
    regions: list[Region]
    """What is recomputed."""
    captured: CapturedGraph
    """What the program was made of."""

    @property
    def copies(self) -> int:
        """Copies that take turns within a micro batch."""
        return self.parts.copies

    @property
    def late_layers(self) -> int:
        """Linear layers whose weights' gradients are computed while those of their inputs travel."""
        return count_delayed(self.segments)

    def activations(self) -> ActivationEstimate:
        """Return what a rank keeps between the forward and the backward pass of one micro batch."""
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
        way = RunMicroBatches if self.parts.micro_batches > 1 else RunProgram
        flat = way.apply(self, torch.is_grad_enabled(), len(tensors), *tensors, *parameters)
        return pytree.tree_unflatten(list(flat), self.output_spec)

    def merge(self, results: Sequence[Sequence[Sequence[Any]]]) -> list[Any]:
        """Join the results of micro batches and copies: scalars are added up with their factor, others joined along
        dimension 0. What is still being added up becomes a LateLoss."""
        return [self._join(values) for values in zip(*self.parts.in_order(results), strict=True)]

    def _join(self, values: Sequence[Any]) -> Any:
        if isinstance(values[0], ValueOnItsWay):
            return LateLoss.of(lambda: self._join([arrived(value) for value in values]), values[0].dtype)
        return values[0] if len(values) == 1 else join_values(list(values), self.scales.loss)

    def gradients_of_copies(self, gradients: Sequence[Tensor | None]) -> list[dict[str, Tensor]]:
        """Return per copy the gradient of every result, by its name in the local graph."""
        copies: list[dict[str, Tensor]] = [{} for _ in range(self.copies)]
        for value, gradient in zip(self.program.outputs, gradients, strict=True):
            if gradient is None or not isinstance(value, fx.Node):
                continue
            parts = [gradient * self.scales.loss] * self.copies if gradient.dim() == 0 else gradient.chunk(self.copies)
            for copy, part in zip(copies, parts, strict=True):
                copy[value.name] = copy[value.name] + part if value.name in copy else part
        return copies

    def gradients_of_loss(self, results: Sequence[Sequence[Any]]) -> list[dict[str, Tensor]]:
        """Return per copy the gradient that begins the backward pass of a micro batch."""
        return [{self.program.outputs[0].name: self._gradient_of_loss(values)} for values in results]

    def _gradient_of_loss(self, values: Sequence[Any]) -> Tensor:
        loss = values[0] if values and isinstance(values[0], ValueOnItsWay) else check_loss(list(values))
        return full_like(loss, self.scales.gradient * current_loss_scale.get())

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


def build_compiled_call(
    captured: CapturedGraph,
    program: LocalProgram,
    stored: dict[str, StoredParameter],
    buffers: dict[str, Tensor],
    *,
    mesh: Mesh,
    rank: int,
    spec: RunSpec,
    executor_class: type[Executor] = Executor,
) -> CompiledCall:
    """Group the parameters, cut the program into segments and make its executor, which is an `executor_class`."""
    used = _use_of_parameters(program, stored)
    regions = find_regions(program, spec.recompute)
    again = [region for region in regions if region.spec.parallel_optimizer_comm_recompute]
    regathered = {use.stored.name for use in used} if spec.regathers else parameters_of(program, again)
    groups = _gather_groups(used, spec, regathered, mesh, rank)
    group_of = {name: number for number, group in enumerate(groups) for name in group.placeholders}
    region_of = {name: number for number, region in enumerate(regions) for name in region.nodes}
    segments = cut_segments(program, group_of, region_of)
    if spec.overlaps_weights:
        delay_weights(segments, group_of, regions)
    device_buffers = {node.name: buffers[name] for name, node in program.buffers.items()}
    device_buffers |= {name: constant for name, (_, constant) in program.constants.items()}
    executor = executor_class(
        program,
        segments,
        groups,
        mesh=mesh,
        rank=rank,
        buffers=device_buffers,
        gradient_groups=_gradient_groups(used, spec, regathered, mesh, rank),
        regions=regions,
    )
    trained = [use.stored for use in used if use.stored.parameter.requires_grad]
    return CompiledCall(
        program, segments, executor, trained, groups, captured.output_spec, spec.parts, spec.scales, regions, captured
    )


@dataclass(frozen=True)
class _Use:
    """A parameter that operators read."""

    stored: StoredParameter
    placeholder: str
    partial_axes: Axes
    """Axes along which its gradient is a partial sum."""
    dtype: torch.dtype
    """In which operators read it."""


def _use_of_parameters(program: LocalProgram, stored: Mapping[str, StoredParameter]) -> list[_Use]:
    """Return the parameters that operators read, in order of first use."""
    uses = ((name, program.parameters[name]) for name in _order_of_use(program))
    return [_Use(stored[name], use.node.name, use.partial_axes, use.dtype) for name, use in uses]


def _gather_groups(
    used: Sequence[_Use], spec: RunSpec, regathered: Collection[str], mesh: Mesh, rank: int
) -> list[ParameterGroup]:
    """Return the parameters in the groups in which they travel to their use."""
    groups = []
    for members in _grouped(used, "gather", spec, regathered):
        first = members[0]
        is_freed = bool(first.stored.shard_axes) and first.stored.name in regathered
        groups.append(ParameterGroup(*_columns(members), mesh, rank, is_freed, dtype=first.dtype))
    return groups


def _gradient_groups(
    used: Sequence[_Use], spec: RunSpec, regathered: Collection[str], mesh: Mesh, rank: int
) -> list[GradientGroup]:
    """Return the trained parameters in the groups in which their gradients travel."""
    return [
        GradientGroup(*_columns(members), mesh, rank, spec.scatters, _sum_dtype(members[0].dtype, spec.sums_wide))
        for members in _grouped(used, "reduce", spec, regathered)
        if members[0].stored.parameter.requires_grad
    ]


def _grouped(used: Sequence[_Use], way: Way, spec: RunSpec, regathered: Collection[str]) -> list[list[_Use]]:
    """Return parameters that travel together and are read in one type."""
    pairs = [(use.stored, use.partial_axes) for use in used]
    together = group_parameters(pairs, way, spec.fusion, regathered=regathered)
    types = [use.dtype for use in used]
    return [[used[i] for i in members] for members in _of_one_type(together, types)]


def _columns(members: Sequence[_Use]) -> tuple[list[StoredParameter], list[str], Axes]:
    """Return the members of a group, their placeholders, and the axes along which their gradients are partial."""
    return [use.stored for use in members], [use.placeholder for use in members], members[0].partial_axes


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
