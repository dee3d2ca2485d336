"""The user's side of parallelism: AutoParallel, its settings, its plan, multi-copy, gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrun.runtime.public_names import loader, names_below

__all__ = sorted(names_below(__name__))

if TYPE_CHECKING:
    from msrun.runtime.parallel.auto_parallel import AutoParallel as AutoParallel
    from msrun.runtime.parallel.batch.divided_batch import GradAccumulation as GradAccumulation
    from msrun.runtime.parallel.batch.divided_batch import MicroBatchInterleaved as MicroBatchInterleaved
    from msrun.runtime.parallel.clip import clip_by_global_norm as clip_by_global_norm
    from msrun.runtime.parallel.clip import clip_grad_norm_ as clip_grad_norm_
    from msrun.runtime.parallel.communication import all_gather as all_gather
    from msrun.runtime.parallel.communication import all_reduce as all_reduce
    from msrun.runtime.parallel.communication import all_to_all as all_to_all
    from msrun.runtime.parallel.communication import broadcast as broadcast
    from msrun.runtime.parallel.communication import reduce_scatter as reduce_scatter
    from msrun.runtime.parallel.context import ParallelMode as ParallelMode
    from msrun.runtime.parallel.context import get_auto_parallel_context as get_auto_parallel_context
    from msrun.runtime.parallel.context import reset_auto_parallel_context as reset_auto_parallel_context
    from msrun.runtime.parallel.context import set_auto_parallel_context as set_auto_parallel_context
    from msrun.runtime.parallel.degrees import Degrees as Degrees
    from msrun.runtime.parallel.found_degrees import FoundDegrees as FoundDegrees
    from msrun.runtime.parallel.found_degrees import search_degrees as search_degrees
    from msrun.runtime.parallel.given_strategies import shard as shard
    from msrun.runtime.parallel.gradient import value_and_grad as value_and_grad
    from msrun.runtime.parallel.modes.own_gradients import layerwise_parallel as layerwise_parallel
    from msrun.runtime.parallel.parameters.fusion import set_comm_fusion as set_comm_fusion
    from msrun.runtime.parallel.pipeline.pipeline import Pipeline as Pipeline
    from msrun.runtime.parallel.plan import ParallelPlan as ParallelPlan
    from msrun.runtime.parallel.recomputation import recompute as recompute
    from msrun.runtime.parallel.verification.report import VerificationReport as VerificationReport

__getattr__ = loader(__name__)


def __dir__() -> list[str]:
    return __all__
