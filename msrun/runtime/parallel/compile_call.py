"""A call of a parallel network becomes the program of this rank: one for all ranks alike, or stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msrun.runtime import world
from msrun.runtime.capture.captured_graph import CapturedGraph, Target
from msrun.runtime.joining.launchers import REAL_VALUES
from msrun.runtime.parallel.batch.divided_batch import DividedBatch
from msrun.runtime.parallel.batch.parts import describe_batch, find_tensors
from msrun.runtime.parallel.compilation.compilation import Compilation, Draft
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.parallel.pipeline.compilation import Division, add_stages, build_stages, divide
from msrun.runtime.parallel.pipeline.pipeline import Pipeline
from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall
from msrun.runtime.parallel.plan import ParallelPlan
from msrun.runtime.parallel.settings import ParallelSettings


def has_no_values() -> bool:
    """Return whether this is a dry run in which parameters have no values."""
    level = world.simulation_level()
    return level is not None and level < REAL_VALUES


def look_at_dry_run(settings: ParallelSettings, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """In a dry run, report what this call would do and end the process; at level 3 after some steps."""
    if world.simulation_level() is not None:
        from msrun.runtime.simulate.session import begin_step

        begin_step(settings, target, args, kwargs)


def compile_call(
    compilation: Compilation, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[CapturedGraph, CompiledCall | PipelinedCall, ParallelPlan]:
    """Return the graph and the program for arguments of these shapes, and what was decided.

    All ranks call it together.

    Raises:
        CaptureError: the network cannot be captured, here or on another rank, or is not the same on all ranks.
        StrategyError: an illegal strategy, schedule or assignment of stages.
    """
    wrappers = compilation.find_wrappers()
    draft: Draft
    with compilation.failing_together():
        if is_pipeline(compilation, wrappers):
            draft = divide(compilation, wrappers, args, kwargs)
        else:
            draft = compilation.draft(wrappers, args, kwargs)
        compilation.storage.check(draft.program, draft.stages)
    compilation.check_ranks_agree(draft.describe(find_tensors(args, kwargs)), batch=describe_batch(args, kwargs))
    call: CompiledCall | PipelinedCall
    with compilation.failing_together():
        if isinstance(draft, Division):
            call, plan = build_stages(compilation, draft)
        else:
            call, plan = compilation.build(draft)
    compilation.check_ranks_agree("built")
    if isinstance(draft, Division) and isinstance(call, PipelinedCall):
        _ = call.line.group  # its ranks make it together, before other groups of some of them
        plan = add_stages(plan, call, draft.assignment, compilation.mesh)
    return draft.captured, call, plan


def is_pipeline(compilation: Compilation, wrappers: Sequence[DividedBatch]) -> bool:
    """Return whether a network runs in stages."""
    return compilation.settings.pipeline.stages > 1 or any(isinstance(wrapper, Pipeline) for wrapper in wrappers)
