"""AutoParallel and what goes with it, under MindSpore's paths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from msrun import runtime
from msrun.errors import CaptureError, StrategyError
from msrun.mindspore.context import ParallelMode, get_auto_parallel_context, set_auto_parallel_context
from msrun.mindspore.missing import missing_names
from msrun.mindspore.ops.table import note_once
from msrun.mindspore.tensor import as_results
from msrun.runtime import AutoParallel as _AutoParallel
from msrun.runtime import GradAccumulation, Layout, MicroBatchInterleaved, get_group_size, get_rank, shard
from msrun.runtime import Pipeline as _Pipeline
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.execute.phase import current_probe
from msrun.runtime.execute.placement import placement_of
from msrun.runtime.parallel.auto_parallel import current_parallel
from msrun.runtime.parallel.context import has_parallel_mode
from msrun.runtime.parts.on_servers import find_remote

__all__ = [
    "AutoParallel", "GradAccumulation", "Layout", "MicroBatchInterleaved", "Pipeline", "PipelineCell",
    "parameter_broadcast", "set_algo_parameters", "shard", "sync_pipeline_shared_parameters",
]  # fmt: skip

_OWN_NAMES = {"_backbone": "network", "_loss_fn": "loss_fn"}
"""MindSpore's names of what a WithLossCell holds -> ours."""
BY_HAND = (ParallelMode.DATA_PARALLEL, ParallelMode.HYBRID_PARALLEL)
"""Modes whose steps reduce gradients themselves, with DistributedGradReducer; the others cut what computes them."""
_EQUAL = 1e-4
"""How near the sums of gradients of two ranks are that somebody has reduced."""


class Pipeline(_Pipeline):
    """`msrun.runtime.Pipeline`, whose `stage_config` may name the cells of a WithLossCell as MindSpore does."""

    def __init__(self, network: Module, micro_size: int, stage_config: Mapping[str, int] | None = None) -> None:
        renamed = {
            ".".join(_OWN_NAMES.get(part, part) for part in name.split(".")): stage
            for name, stage in (stage_config or {}).items()
        }
        super().__init__(network, micro_size, renamed)


PipelineCell = Pipeline


def parameter_broadcast(net: Module, layout: Any = None, cur_rank: int = 0, initial_rank: int = 0) -> None:
    """Give all ranks the parameters of one."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(runtime.broadcast(parameter, initial_rank))


def in_context(step: Callable[..., Any], network: Any = None) -> Callable[..., Any]:
    """Return `step`, which AutoParallel runs where the context says "semi_auto_parallel" or "auto_parallel".

    Args:
        step: a network that returns its loss, or a function that calls value_and_grad.
        network: what `step` calls, if not `step` itself; with an AutoParallel inside, nothing is added.
    """
    made: dict[str, _AutoParallel] = {}
    called = step if network is None else network

    @functools.wraps(step, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = get_auto_parallel_context("parallel_mode")
        if not _is_parallel() or mode in BY_HAND or (mode not in made and _has_auto_parallel(called)):
            return step(*args, **kwargs)
        if mode not in made:
            made[mode] = _AutoParallel(step)
        return made[mode](*args, **kwargs)

    return run


def _is_parallel() -> bool:
    """Return whether the context wants networks to run in parallel, and no AutoParallel does so around this call."""
    is_inside = current_parallel.get() is not None or current_probe.get() is not None
    return not is_inside and get_group_size() > 1 and has_parallel_mode()


def _has_auto_parallel(called: Callable[..., Any]) -> bool:
    """Return whether a module or function is, holds or names an AutoParallel."""
    try:
        left = [find_target(called).root]
    except CaptureError:  # it names no module at all
        return False
    for module in left:
        if isinstance(module, _AutoParallel):
            return True
        left.extend(one for one in module._modules.values() if one is not None)
    return False


def check_reduced(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Refuse gradients that are each rank's own, where the context wants one model of all ranks; those of parameters
    marked layerwise_parallel, and of parts, may differ.

    Raises:
        StrategyError: they differ between the ranks.
    """
    mode = get_auto_parallel_context("parallel_mode")
    if not _is_parallel():
        return
    sums = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        is_own = getattr(parameter, "layerwise_parallel", False) or find_remote(parameter) is not None
        if not is_own and placement_of(parameter) is None and type(gradient) is Tensor and not gradient.is_sparse:
            flat = gradient.detach().flatten().double()
            sums += [flat.abs().sum(), flat @ torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)]
    if not sums:
        return
    found = torch.stack(sums)
    spread = runtime.all_reduce(found, "max") + runtime.all_reduce(-found, "max")
    if bool((spread > _EQUAL * (found.abs() + 1e-12)).any()):
        remedy = "AutoParallel(net) or Model(net, ...)"
        if mode in BY_HAND:
            remedy = "grads = nn.DistributedGradReducer(optimizer.parameters)(grads) before the optimizer"
        raise StrategyError(
            f"an optimizer steps with gradients that differ between the ranks, under parallel_mode={mode!r}, so every "
            f'rank would train a model of its own: use {remedy}, or parallel_mode="stand_alone"'
        )


class _Context:
    """`auto_parallel_context().get_gradients_mean()` and its like: the words of get_auto_parallel_context."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):
            return lambda: get_auto_parallel_context(name.removeprefix("get_"))
        if name.startswith("set_"):
            return lambda value, *_: set_auto_parallel_context(**{name.removeprefix("set_"): value})
        raise AttributeError(name)


def auto_parallel_context() -> Any:
    """Return the context, with a `get_` and a `set_` method for each word."""
    return _Context()


def sync_pipeline_shared_parameters(net: Module) -> None:
    """Do nothing: what several stages share is one parameter on each rank that has it."""


def set_algo_parameters(**words: Any) -> None:
    """Do nothing: they steer MindSpore's search of strategies; `auto_parallel_search_mode` chooses ours."""
    note_once(f"set_algo_parameters({', '.join(words)})")


def _is_sharding_propagation() -> bool:
    return get_auto_parallel_context("search_mode") == "sharding_propagation"


_get_device_num, _get_global_rank, _get_pipeline_stages = get_group_size, get_rank, lambda: 1
for _word in ("parallel_mode", "gradients_mean", "full_batch", "enable_parallel_optimizer"):
    globals()[f"_get_{_word}"] = functools.partial(get_auto_parallel_context, _word)
__getattr__ = missing_names("parallel", __all__)


class AutoParallel(_AutoParallel):
    """`msrun.runtime.AutoParallel`, whose results print as numbers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step function, or the network on this rank's part."""
        return as_results(super().forward(*args, **kwargs))
