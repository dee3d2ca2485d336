"""A compiled call from a partitioned program: its parameters in groups, its segments, its executor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from msrun.runtime import world
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.execute.executor import Executor
from msrun.runtime.execute.gradients import GradientGroup
from msrun.runtime.execute.parameters import ParameterGroup
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.parallel.batch.parts import BatchParts
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.parallel.parameters.fusion import Way, group_parameters
from msrun.runtime.parallel.scaling import scales
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.local_values import local_values, parameter_memory
from msrun.runtime.partition.program import LocalProgram, ParameterUse
from msrun.runtime.schedule.activations import ActivationEstimate, estimate_activations
from msrun.runtime.schedule.compiled_segments import compile_segments
from msrun.runtime.schedule.deferred_weights import defer_weights
from msrun.runtime.schedule.replay import RecomputeSpec, find_regions, parameters_of, plan_replays
from msrun.runtime.schedule.segments import cut_segments
from msrun.runtime.sharding.layout import Axes, Mesh


def build_compiled_call(
    captured: CapturedGraph,
    program: LocalProgram,
    stored: dict[str, PlacedParameter],
    buffers: dict[str, Tensor],
    *,
    mesh: Mesh,
    rank: int,
    settings: ParallelSettings = ParallelSettings(),  # noqa: B008 - frozen
    parts: BatchParts = BatchParts(),  # noqa: B008 - frozen
    recompute: Mapping[str, RecomputeSpec] = MappingProxyType({}),
    memory_of: Mapping[str, str] | None = None,
    defers_weights: bool = False,
) -> CompiledCall:
    """Group the parameters, cut the program into segments and make its executor.

    Args:
        recompute: module path -> how it is recomputed.
        memory_of: value -> the parameter whose memory it is, by name; None: to be found, of a whole program.
        defers_weights: weights' gradients are computed when the schedule of a pipeline says.
    """
    used = [_Used(stored[name], program.parameters[name]) for name in _order_of_use(program)]
    regions = find_regions(program, recompute)
    again = [region for region in regions if region.spec.parallel_optimizer_comm_recompute]
    regathered = {each.use.name for each in used} if settings.level == "level3" else parameters_of(program, again)
    if memory_of is None:
        is_freed = any(each.stored.placement.shard_axes and each.use.name in regathered for each in used)
        memory_of = _find_memory(program) if is_freed else {}
    if memory_of is None:
        regathered = set()
        program.notes.append("gathered parameters are kept for the backward pass: only a run could tell who views them")
    groups = _gather_groups(used, settings, regathered, mesh, rank)
    group_of = {name: number for number, group in enumerate(groups) for name in group.placeholders}
    region_of = {name: number for number, region in enumerate(regions) for name in region.nodes}
    freed = {name for group in groups if group.regathers for name in group.placeholders}
    memory_of = {value: parameter for value, parameter in (memory_of or {}).items() if parameter in freed}
    segments = cut_segments(program, group_of, region_of, memory_of)
    if settings.overlaps_weights or defers_weights:
        dimensions = {use.node.name: len(use.shape) for _, use in used}
        defer_weights(segments, dimensions, regions, everywhere=defers_weights)
    if settings.compiler is not None and world.simulation_level() is None:
        program.notes.append(compile_segments(segments, settings.compiler))
    device_buffers = {node.name: buffers[name] for name, node in program.buffers.items()}
    device_buffers |= {name: constant for name, (_, constant) in program.constants.items()}
    executor = Executor(
        program,
        segments,
        groups,
        mesh=mesh,
        rank=rank,
        buffers=device_buffers,
        gradient_groups=_gradient_groups(used, settings, regathered, mesh, rank),
        regions=regions,
        memory_of=memory_of,
    )
    factors = scales(settings.compat, parts.copies, parts.micro_batches)
    trained = [stored for stored, _ in used if stored.parameter.requires_grad]
    return CompiledCall(program, segments, executor, trained, groups, parts, factors, regions, captured)


def activations_of(
    captured: CapturedGraph,
    program: LocalProgram,
    recompute: Mapping[str, RecomputeSpec],
    buffers: Mapping[str, Tensor],
    copies: int,
) -> ActivationEstimate:
    """Return what a step of a program keeps, before its parameters are put in place.

    Args:
        recompute: module path -> how it is recomputed.
        buffers: of the network, by name.
    """
    regions = find_regions(program, recompute)
    region_of = {name: number for number, region in enumerate(regions) for name in region.nodes}
    segments = cut_segments(program, {}, region_of)
    given = {node.name: buffers[name] for name, node in program.buffers.items()}
    given |= {name: constant for name, (_, constant) in program.constants.items()}
    trained = frozenset(name for name, use in program.parameters.items() if use.node.meta["val"].requires_grad)
    replays = plan_replays(segments, regions, program.outputs)
    return estimate_activations(captured, program, segments, replays, given, trained, copies)


def _find_memory(program: LocalProgram) -> dict[str, str] | None:
    """Return which values are whose memory; None when only a run could tell."""
    try:
        return parameter_memory(local_values(program))
    except RuntimeError:  # an operator that needs values
        return None


class _Used(NamedTuple):
    """A parameter that operators read: as it is stored, and as the graph uses it."""

    stored: PlacedParameter
    use: ParameterUse


def _gather_groups(
    used: Sequence[_Used], settings: ParallelSettings, regathered: Collection[str], mesh: Mesh, rank: int
) -> list[ParameterGroup]:
    """Return the parameters in the groups in which they travel to their use."""
    groups = []
    for members in _grouped(used, "gather", settings, regathered):
        first = members[0]
        is_freed = bool(first.stored.placement.shard_axes) and first.use.name in regathered
        groups.append(ParameterGroup(*_columns(members), mesh, rank, is_freed, dtype=first.use.dtype))
    return groups


def _gradient_groups(
    used: Sequence[_Used], settings: ParallelSettings, regathered: Collection[str], mesh: Mesh, rank: int
) -> list[GradientGroup]:
    """Return the trained parameters in the groups in which their gradients travel."""
    return [
        GradientGroup(
            *_columns(members),
            mesh,
            rank,
            settings.level != "level1",
            _sum_dtype(members[0].use.dtype, settings.gradient_fp32_sync),
            members[0].use.has_row_gradient,
        )
        for members in _grouped(used, "reduce", settings, regathered)
        if members[0].stored.parameter.requires_grad
    ]


def _grouped(
    used: Sequence[_Used], way: Way, settings: ParallelSettings, regathered: Collection[str]
) -> list[list[_Used]]:
    """Return parameters that travel together and are read in one type."""
    pairs = [(stored, use.partial_axes) for stored, use in used]
    alone = {use.name for _, use in used if use.has_row_gradient}
    together = group_parameters(pairs, way, settings.comm_fusion, regathered=regathered, alone=alone)
    types = [use.dtype for _, use in used]
    return [[used[i] for i in members] for members in _of_one_type(together, types)]


def _columns(members: Sequence[_Used]) -> tuple[list[PlacedParameter], list[str], Axes]:
    """Return the members of a group, their placeholders, and the axes along which their gradients are partial."""
    return [stored for stored, _ in members], [use.node.name for _, use in members], members[0].use.partial_axes


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
