"""A call of a parallel network becomes the program of this rank: one for all ranks alike, or stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msrun.errors import StrategyError
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.parallel.compilation.compilation import Compilation
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.parallel.pipeline.compilation import compile_pipeline
from msrun.runtime.parallel.pipeline.pipeline import Pipeline
from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall
from msrun.runtime.parallel.plan import ParallelPlan


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
    if compilation.settings.pipeline.stages > 1 or any(isinstance(wrapper, Pipeline) for wrapper in wrappers):
        if compilation.settings.search is not None:
            raise StrategyError(
                f"parallel_mode={compilation.settings.search.mode!r} with a pipeline: strategies of its stages are not "
                'searched for; use parallel_mode="semi_auto" with it, or no pipeline'
            )
        return compile_pipeline(compilation, wrappers, args, kwargs)
    return compilation.compile(wrappers, args, kwargs)
