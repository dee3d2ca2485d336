"""Compiling a pipeline: the captured graph of one micro batch becomes the stages of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.execute.placement import PlacedParameter, placement_of, placements
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.batch.divided_batch import DividedBatch, find_parts
from msrun.runtime.parallel.batch.parts import BatchParts, describe_batch, find_tensors
from msrun.runtime.parallel.compilation.compilation import Compilation, Draft, host_inputs_of
from msrun.runtime.parallel.compilation.compiled import ProgramCall
from msrun.runtime.parallel.compilation.kept_captures import find_or_make
from msrun.runtime.parallel.parameters.storage import ParameterStorage, StageHolders
from msrun.runtime.parallel.pipeline.pipeline import Pipeline, find_pipeline, pin_modules, pin_parameters
from msrun.runtime.parallel.pipeline.pipelined import Line, PipelinedCall
from msrun.runtime.parallel.pipeline.schedule import (
    Schedule,
    build_pipeline_plan,
    build_schedule,
    choose_schedule,
    default_chunks,
)
from msrun.runtime.parallel.plan import ParallelPlan, with_traffic
from msrun.runtime.parallel.precision import scales
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.borders import place_stages
from msrun.runtime.partition.events import LocalValues, StepEvents, tell
from msrun.runtime.partition.program import LocalProgram
from msrun.runtime.partition.stages import StageAssignment, StageProgram, assign_stages, cut_stages, holders_of


@dataclass(frozen=True)
class Division(Draft):
    """A network divided into stages: the same on every rank."""

    schedule: Schedule
    assignment: StageAssignment
    events: StepEvents
    loss: fx.Node | None
    programs: list[StageProgram]
    """Of all stages."""

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Stages that read a parameter, by its name."""
        return holders_of(self.program, self.programs)

    @property
    def stages(self) -> StageHolders:
        """Who holds which parameter."""
        return StageHolders(self.holders, ())

    def build(self, compilation: Compilation) -> tuple[ProgramCall, ParallelPlan]:
        """Return what runs the stages of this rank, and what was decided."""
        return build_stages(compilation, self)

    def finish(self, call: ProgramCall, plan: ParallelPlan) -> ParallelPlan:
        """Return a plan that knows what all stages of ranks move."""
        assert isinstance(call, PipelinedCall)
        _ = call.line.group  # its ranks make it together, before other groups of some of them
        assert plan.traffic is not None
        size = call.program.mesh.size
        pipeline = build_pipeline_plan(call, self.assignment, gather(plan.traffic)[::size])
        return replace(plan, world_size=world.get_group_size(), pipeline=pipeline)

    def describe(self, tensors: Sequence[Tensor]) -> str:
        """Return it and how the stages run as text that is equal on all ranks that run the same."""
        division = sorted(f"{node.name} {stage}" for node, stage in self.assignment.stage_of.items())
        on_host = [operator.name for operator in self.program.operators if operator.on_host]
        return f"{super().describe(tensors)}\n{self.schedule}\n{division}\n{on_host}"


def compile_call(
    compilation: Compilation, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[CapturedGraph, ProgramCall, ParallelPlan]:
    """Return the graph and the program for arguments of these shapes, and what was decided.

    All ranks call it together.
    """
    wrappers = compilation.find_wrappers()
    with compilation.failing_together():
        is_divided = _is_divided(compilation, wrappers)
        draft, kept = find_or_make(compilation, wrappers, args, kwargs, draft_call, is_divided=is_divided)
        compilation.storage.check(draft.program, draft.stages)
    compilation.check_ranks_agree(draft.describe(find_tensors(args, kwargs)), batch=describe_batch(args, kwargs))
    with compilation.failing_together():
        call, plan = draft.build(compilation)
    compilation.check_ranks_agree("built")
    return draft.captured, call, replace(draft.finish(call, plan), kept=kept)


def _is_divided(compilation: Compilation, wrappers: list[DividedBatch]) -> bool:
    return compilation.settings.pipeline.stages > 1 or any(isinstance(wrapper, Pipeline) for wrapper in wrappers)


def draft_call(
    compilation: Compilation, wrappers: list[DividedBatch], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Draft:
    """Return the local program for arguments of these shapes, or the stages of one; exchanges nothing."""
    if _is_divided(compilation, wrappers):
        return divide(compilation, wrappers, args, kwargs)
    return compilation.draft(wrappers, args, kwargs)


def divide(
    compilation: Compilation, wrappers: list[DividedBatch], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Division:
    """Capture a network and divide it into stages, alike on every rank; exchanges nothing."""
    settings, root = compilation.settings, compilation.target.root
    pipeline = find_pipeline(wrappers, settings.pipeline.stages)
    if settings.pipeline.stages > 1:
        _release_tables(root, settings.pipeline.stages)
    schedule = _schedule(compilation, pipeline, find_parts(wrappers))
    draft = compilation.draft(wrappers, args, kwargs, is_placed=False)
    captured, program = draft.captured, draft.program
    _check_supported(settings)
    assignment = _assign(compilation, pipeline, captured, program, schedule)
    events = _tell(program)
    loss = _find_loss(program, events.values)
    stages = cut_stages(program, assignment.stage_of, schedule.stages, events.values, loss)
    host_inputs = host_inputs_of(find_tensors(args, kwargs))
    place_stages(program, stages, stored=compilation.storage.on_host, host_inputs=host_inputs)
    given = captured, program, draft.parts, draft.recompute, draft.chosen
    return Division(*given, schedule, assignment, events, loss, stages)


def _release_tables(root: nn.Module, stages: int) -> None:
    """Let the stages hold the tables of EmbeddingLookups that every rank has made whole."""
    for name, parameter in root.named_parameters():
        placed = placement_of(parameter)
        if placed is None or not placed.exchanges_rows:
            continue
        if placed.is_cut:
            raise StrategyError(
                f"{user_name(name)}: {placed.reason} cuts the table over all {placed.mesh.size} ranks, of which one "
                f'stage of pipeline(stages={stages}) has only some: give slice_mode="batch_slice"'
            )
        del placements[parameter]


def _tell(program: LocalProgram) -> StepEvents:
    try:
        return tell(program)
    except RuntimeError as error:  # an operator that needs values, of which only the run has any
        raise StrategyError(
            f"the stages of a pipeline must know the sizes of what they send each other, but {type(error).__name__}: "
            f"{str(error).splitlines()[0][:200]}; use GradAccumulation instead of Pipeline"
        ) from error


def build_stages(compilation: Compilation, division: Division) -> tuple[PipelinedCall, ParallelPlan]:
    """Place the parameters and make the stages of a rank; its plan knows nothing of other ranks' traffic yet."""
    settings, program, schedule = division.chosen.settings, division.program, division.schedule
    line = _line(compilation, schedule.ranks)
    own = schedule.stages_of(line.own)
    compilation.place(division, StageHolders(division.holders, own, schedule.holder, division.assignment.by_name))
    memory_of = division.events.parameter_memory
    compiled = {
        stage: compilation.build_call(
            division,
            division.programs[stage].program,
            division.recompute,
            memory_of,
            defers_weights=schedule.splits_backward,
        )
        for stage in own
    }
    if schedule.splits_backward and settings.overlaps_weights:
        program.notes.append(f"transformer_opt changes nothing: {schedule.name} has a time of its own for weights")
    buffers = dict(compilation.target.root.named_buffers())
    changed = {node.name: buffers[name] for name, node in program.buffers.items() if node in program.buffer_updates}
    if changed and division.parts.total > 1:
        program.notes.append(
            f"each micro batch changes {len(changed)} buffers in its turn: batch norm has statistics of a micro batch"
        )
    compilation.note_calls(program, division.recompute, () if schedule.splits_backward else compiled.values())
    result = PipelinedCall(
        program=program,
        schedule=schedule,
        line=line,
        stages=division.programs,
        own=compiled,
        tied=_tied_parameters(compilation.storage, program, schedule, line),
        elsewhere={
            name: stored
            for name, stored in compilation.storage.stored.items()
            if name in program.parameters and stored.parameter.requires_grad and not stored.placement.is_held
        },
        holders=compilation.storage.holders,
        buffers=changed,
        events=division.events,
        loss=division.loss,
        trains=any(value.requires_grad for value in division.events.values.values()),
        parts=division.parts,
        scales=scales(settings.compat, division.parts.copies, division.parts.micro_batches),
        output_broadcast=settings.pipeline.output_broadcast,
    )
    return result, with_traffic(compilation.plan_of(result, division), result, compilation.rank)


def _tied_parameters(
    storage: ParameterStorage, program: LocalProgram, schedule: Schedule, line: Line
) -> dict[str, PlacedParameter]:
    """Return the trained parameters that this rank and others of its line hold, by name."""
    tied = {}
    for name, stages_of_it in storage.holders.items():
        if name not in program.parameters or not storage.stored[name].parameter.requires_grad:
            continue
        sharing = line.ranks_of(schedule, stages_of_it)
        if line.ranks[line.own] in sharing and len(sharing) > 1:
            tied[name] = storage.stored[name]
    return tied


def _check_supported(settings: ParallelSettings) -> None:
    if settings.activation_limit_bytes is not None:
        raise StrategyError(
            'recompute("auto") does not know how many micro batches the stages of a pipeline hold: name the modules, '
            "recompute(module)"
        )
    if settings.device_limit is not None:
        raise StrategyError(
            "device_memory_limit does not know how many micro batches the stages of a pipeline hold: name the modules, "
            'set_target(module, "cpu")'
        )


def _schedule(compilation: Compilation, pipeline: Pipeline, parts: BatchParts) -> Schedule:
    spec = compilation.settings.pipeline
    name = choose_schedule(spec.scheduler, spec.interleave)
    chunks = default_chunks(name, spec.interleave)
    if spec.interleave and name in ("interleaved", "zero_bubble"):
        named = max(pipeline.stage_config.values(), default=0) + 1
        chunks = max(chunks, -(-named // spec.stages))
    return build_schedule(name, spec.stages, chunks, parts.micro_batches)


def _assign(
    compilation: Compilation, pipeline: Pipeline, captured: CapturedGraph, program: LocalProgram, schedule: Schedule
) -> StageAssignment:
    placed = compilation.storage.holders
    if placed:
        pins, earlier = pin_parameters(captured, placed), compilation.storage.operators
        return assign_stages(captured, schedule.stages, pins, "parameters placed before", earlier)
    if not pipeline.stage_config:
        return assign_stages(captured, schedule.stages, {}, "equal cost")
    pins, notes = pin_modules(captured, compilation.target.root, pipeline, schedule.stages)
    program.notes += notes
    return assign_stages(captured, schedule.stages, pins, "stage_config")


def _find_loss(program: LocalProgram, values: LocalValues) -> fx.Node | None:
    """Return the one scalar result that has a gradient; None when there is none, or not one alone."""
    scalars = {
        node: None
        for node in program.outputs
        if isinstance(node, fx.Node) and not values[node].shape and values[node].requires_grad
    }
    return next(iter(scalars)) if len(scalars) == 1 else None


def _line(compilation: Compilation, pipeline_ranks: int) -> Line:
    mesh = compilation.mesh
    place = compilation.rank - mesh.first_rank
    ranks = tuple(stage * mesh.size + place for stage in range(pipeline_ranks))
    return Line(ranks, mesh.first_rank // mesh.size, world.device())
