"""Sketches: a call of a parallel network compiled for some ranks of the world without placing any parameter.

Everything is what a real first call makes of the same network: graph, decisions, local program, segments, executor and
plan. Only the parameters' parts are fake tensors. Ranks of one pipeline stage do the same, so there is one sketch for
each stage of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from msrun.runtime import world
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.execute.placement import PlacedParameter, placements
from msrun.runtime.parallel.batch.parts import find_tensors
from msrun.runtime.parallel.compilation.compilation import Compilation
from msrun.runtime.parallel.compilation.compiled import ProgramCall
from msrun.runtime.parallel.parameters.storage import ParameterStorage, StageHolders
from msrun.runtime.parallel.pipeline.compilation import Division, draft_call
from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall
from msrun.runtime.parallel.pipeline.plan import build_pipeline_plan
from msrun.runtime.parallel.plan import ParallelPlan
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.collective_messages import Totals
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.sharding.layout import Mesh, build_mesh


class SketchedStorage(ParameterStorage):
    """Decides how parameters are stored, and puts fake parts beside the user's own, which stay as they are."""

    def __init__(
        self, root: nn.Module, mesh: Mesh, rank: int, settings: ParallelSettings, mode: FakeTensorMode
    ) -> None:
        super().__init__(root, mesh, rank, settings.hsdp)
        self._mode = mode

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Stages of every parameter of a pipeline."""
        return {name: stages for name, stages in self._stages.holders.items() if stages}

    @property
    def _is_complete(self) -> bool:
        return bool(self.stored)

    def place(self, program: LocalProgram, stages: StageHolders | None = None) -> list[str]:
        """Make the parts; nothing is exchanged, and no memory taken."""
        self._stages = stages or self._stages
        self.stored = {name: self._with_part(item) for name, item in self._decide_all(program).items()}
        return []

    def _with_part(self, item: PlacedParameter) -> PlacedParameter:
        with self._mode:
            part = torch.empty(item.placement.local_shape, dtype=item.parameter.dtype)
        parameter = nn.Parameter(part, item.parameter.requires_grad)
        placements[parameter] = item.placement
        return replace(item, parameter=parameter)


@dataclass(frozen=True)
class Sketch:
    """What the ranks of one stage do in a step; of a network without stages, what all ranks do."""

    ranks: range
    """That are alike."""
    rank: int
    """The one that was looked at."""
    call: ProgramCall
    storage: SketchedStorage
    plan: ParallelPlan


def sketch_call(
    target: Target,
    settings: ParallelSettings,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    own_rank: int,
) -> list[Sketch]:
    """Return one sketch for each stage of ranks, in order; the dry run stands for the last of these ranks afterwards.

    Args:
        own_rank: of the user's choice; of other stages the rank of equal place is looked at.

    Raises:
        CaptureError: the network cannot be captured.
        StrategyError: an illegal strategy, schedule or assignment of stages.
    """
    size = settings.pipeline.ranks_per_stage(world.get_group_size())
    world.stand_for(own_rank)
    compilation = _compilation(target, settings, own_rank, size, mode)
    if settings.hsdp is not None:
        settings.hsdp.check_world(size)
    division = draft_call(compilation, compilation.find_wrappers(), args, kwargs)
    if not isinstance(division, Division):
        call, plan = division.build(compilation)
        assert isinstance(compilation.storage, SketchedStorage)
        return [Sketch(range(size), own_rank, call, compilation.storage, plan)]
    notes = [*division.program.notes]
    sketches = []
    for stage in range(settings.pipeline.stages):
        rank = stage * size + own_rank % size
        world.stand_for(rank)
        of_stage = _compilation(target, settings, rank, size, mode)
        of_stage.mesh = of_stage.storage.use_mesh(replace(compilation.mesh, first_rank=stage * size), ())
        of_stage.layouts = compilation.layouts
        division.program.notes[:] = notes
        made, plan = division.build(of_stage)
        assert isinstance(of_stage.storage, SketchedStorage)
        sketches.append(Sketch(range(stage * size, (stage + 1) * size), rank, made, of_stage.storage, plan))
    traffic = [sketch.plan.traffic for sketch in sketches if sketch.plan.traffic is not None]
    return [_with_traffic(sketch, division, traffic) for sketch in sketches]


def _with_traffic(sketch: Sketch, division: Division, traffic: Sequence[Totals]) -> Sketch:
    """Return a sketch whose plan knows what all stages of ranks move."""
    assert isinstance(sketch.call, PipelinedCall)
    pipeline = build_pipeline_plan(sketch.call, division.assignment, traffic)
    return replace(sketch, plan=replace(sketch.plan, world_size=world.get_group_size(), pipeline=pipeline))


def _compilation(target: Target, settings: ParallelSettings, rank: int, size: int, mode: FakeTensorMode) -> Compilation:
    mesh = build_mesh(size, rank // size * size)
    return Compilation(target, settings, mesh, rank, SketchedStorage(target.root, mesh, rank, settings, mode))


def fake_batch(args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> list[Tensor]:
    """Return fake tensors like the user's."""
    return [mode.from_tensor(tensor) for tensor in find_tensors(args, kwargs)]


def placed_parts(sketch: Sketch) -> list[PlacedParameter]:
    """Return the parameters that a rank of a sketch holds, parts of other stages left out."""
    return [item for item in sketch.storage.stored.values() if item.placement.is_held]
