"""Compiling a pipeline: the captured graph of one micro batch becomes the stages of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from msrun.errors import ParallelError, StrategyError
from msrun.runtime import world
from msrun.runtime.graph.capture import CapturedGraph, Target
from msrun.runtime.graph.local_values import LocalValue, infer_local_values
from msrun.runtime.graph.partition import LocalProgram
from msrun.runtime.graph.stage_assignment import StageAssignment, assign_stages
from msrun.runtime.graph.stage_execution import StageExecutor
from msrun.runtime.graph.stages import cut_stages, holders_of
from msrun.runtime.groups import axes_group
from msrun.runtime.layout import Mesh
from msrun.runtime.parallel.compiled import build_compiled_call
from msrun.runtime.parallel.pipeline import MicroBatchCalls, Pipeline, capturing_micro_batch, note_result
from msrun.runtime.parallel.pipeline_plan import build_pipeline_plan
from msrun.runtime.parallel.pipelined import PipelinedCall
from msrun.runtime.parallel.plan import ParallelPlan, build_parallel_plan
from msrun.runtime.parallel.scaling import part_scale, step_gradient_scale
from msrun.runtime.parallel.schedule import Schedule, build_schedule, choose_schedule, default_chunks
from msrun.runtime.parallel.stage_modules import pin_modules, pin_parameters
from msrun.runtime.parallel.stage_runner import Line
from msrun.runtime.parallel.storage import StageHolders

if TYPE_CHECKING:
    from msrun.runtime.parallel.compilation import Compilation


def compile_pipeline(
    compilation: Compilation, pipeline: Pipeline, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor]
) -> tuple[PipelinedCall, ParallelPlan]:
    """Return this rank's stages for arguments of these shapes, and what was decided. All ranks call it together.

    Raises:
        CaptureError: the network cannot be captured, here or on another rank, or is not the same on all ranks.
        StrategyError: an illegal strategy, schedule or assignment of stages.
    """
    copies = 1
    try:
        schedule = _schedule(compilation, pipeline)
        call, copies = _micro_batch_call(compilation.target, pipeline)
        _check_batch(pipeline, tensors)
        with capturing_micro_batch() as calls:
            captured, program = compilation.capture_program(call, args, kwargs, tensors, schedule.micro_size * copies)
        if compilation.target.call is not pipeline:
            _check_function(calls)
        assignment = _assign(compilation, pipeline, captured, program, schedule)
        values = infer_local_values(
            program,
            trainable={name: p.requires_grad for name, p in compilation.target.root.named_parameters()},
            differentiable_inputs=frozenset(i for i, tensor in enumerate(tensors) if tensor.requires_grad),
        )
    except ParallelError as error:
        compilation.check_ranks_agree("", failure=str(error))
        raise
    loss = _find_loss(program, values)
    stages = cut_stages(program, assignment.stage_of, schedule.stages, values, loss)
    division = sorted(f"{node.name} {stage}" for node, stage in assignment.stage_of.items())
    compilation.check_ranks_agree(f"{compilation.describe(program, tensors)}\n{schedule}\n{division}")
    holders = holders_of(program, stages)
    line = _line(compilation.mesh, schedule.ranks)
    own = schedule.stages_of(line.own)
    program.notes += compilation.storage.place(program, StageHolders(holders, own))
    placed = compilation.storage.holders
    tied = {
        name: compilation.storage.stored[name]
        for name, stages_of_it in placed.items()
        if name in program.parameters
        and compilation.storage.stored[name].parameter.requires_grad
        and line.ranks[line.own] in (sharing := line.ranks_of(schedule, stages_of_it))
        and len(sharing) > 1
    }
    settings = compilation.settings
    hsdp = settings.hsdp
    buffers = dict(compilation.target.root.named_buffers())
    loss_scale = part_scale(settings.compat, copies)
    compiled = {
        stage: build_compiled_call(
            captured,
            stages[stage].program,
            compilation.storage.stored,
            buffers,
            mesh=compilation.mesh,
            rank=compilation.rank,
            copies=copies,
            scale=loss_scale,
            regathers=hsdp is not None and hsdp.optimizer_level == "level3",
            executor_class=StageExecutor,
        )
        for stage in own
    }
    result = PipelinedCall(
        program=program,
        schedule=schedule,
        line=line,
        stages=stages,
        own=compiled,
        tied=tied,
        holders=placed,
        values=values,
        loss=loss,
        trains=any(value.requires_grad for value in values.values()),
        copies=copies,
        loss_scale=loss_scale * part_scale(settings.compat, schedule.micro_size),
        gradient_scale=loss_scale * step_gradient_scale(schedule.micro_size),
        output_broadcast=settings.pipeline.output_broadcast,
        output_spec=captured.output_spec,
    )
    plan = build_parallel_plan(result, compilation.storage, settings=settings, mesh=compilation.mesh)
    return result, replace(plan, world_size=world.get_group_size(), pipeline=build_pipeline_plan(result, assignment))


def _check_batch(pipeline: Pipeline, tensors: Sequence[Tensor]) -> None:
    parts = pipeline.micro_size * pipeline.copies
    for rows in (tensor.shape[0] for tensor in tensors if tensor.dim()):
        if rows % parts:
            copies = f" of {pipeline.copies} copies" if pipeline.copies > 1 else ""
            raise StrategyError(
                f"a batch of {rows} rows on this rank cannot be cut into {pipeline.micro_size} equal micro batches"
                f"{copies}; give a batch that {parts} divides"
            )


def _schedule(compilation: Compilation, pipeline: Pipeline) -> Schedule:
    spec = compilation.settings.pipeline
    name = choose_schedule(spec.scheduler, spec.interleave)
    chunks = default_chunks(name, spec.interleave)
    if spec.interleave and name in ("interleaved", "zero_bubble"):
        named = max(pipeline.stage_config.values(), default=0) + 1
        chunks = max(chunks, -(-named // spec.stages))
    return build_schedule(name, spec.stages, chunks, pipeline.micro_size)


def _micro_batch_call(target: Target, pipeline: Pipeline) -> tuple[Target, int]:
    """Return what one copy of one micro batch runs through, and the number of copies."""
    call = target.call if target.call is pipeline else _watched(target.call)
    return Target(call, target.root), pipeline.copies


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one micro batch that refuses to change the losses of its Pipeline.

    What it did to them, it would do to each micro batch instead of to their mean.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        note_result(result)
        return result

    return call


def _check_function(calls: MicroBatchCalls) -> None:
    if len(calls.results) != 1:
        raise StrategyError(
            f"the function calls its Pipeline {len(calls.results)} times: call it once, and return what it returns"
        )
    if not calls.is_returned:
        raise StrategyError(
            "the function changes the loss that its Pipeline returns: return it as it is, and put what is to be "
            "computed of it into the network"
        )


def _assign(
    compilation: Compilation, pipeline: Pipeline, captured: CapturedGraph, program: LocalProgram, schedule: Schedule
) -> StageAssignment:
    placed = compilation.storage.holders
    if placed:
        return assign_stages(captured, schedule.stages, pin_parameters(captured, placed), "parameters placed before")
    if not pipeline.stage_config:
        return assign_stages(captured, schedule.stages, {}, "equal cost")
    pins, notes = pin_modules(captured, compilation.target.root, pipeline, schedule.stages)
    program.notes += notes
    return assign_stages(captured, schedule.stages, pins, "stage_config")


def _find_loss(program: LocalProgram, values: Mapping[fx.Node, LocalValue]) -> fx.Node | None:
    """Return the one scalar result that has a gradient; None when there is none, or not one alone."""
    scalars = {
        node: None
        for node in program.outputs
        if isinstance(node, fx.Node) and not values[node].shape and values[node].requires_grad
    }
    return next(iter(scalars)) if len(scalars) == 1 else None


def _line(mesh: Mesh, pipeline_ranks: int) -> Line:
    place = world.get_rank() - mesh.first_rank
    ranks = tuple(stage * mesh.size + place for stage in range(pipeline_ranks))
    group = axes_group(Mesh((pipeline_ranks, mesh.size)), (0,))
    return Line(ranks, mesh.first_rank // mesh.size, group, world.device())
