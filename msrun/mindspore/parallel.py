"""AutoParallel and what goes with it, under MindSpore's paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from msrun.mindspore.context import get_auto_parallel_context, set_auto_parallel_context
from msrun.mindspore.missing import missing_name
from msrun.mindspore.tensor import as_results
from msrun.runtime import AutoParallel as _AutoParallel
from msrun.runtime import (
    GradAccumulation,
    Layout,
    MicroBatchInterleaved,
    Pipeline,
    broadcast,
    get_group_size,
    get_rank,
    shard,
)

__all__ = [
    "AutoParallel",
    "GradAccumulation",
    "Layout",
    "MicroBatchInterleaved",
    "Pipeline",
    "PipelineCell",
    "parameter_broadcast",
    "shard",
]

PipelineCell = Pipeline


def parameter_broadcast(net: nn.Module, layout: Any = None, cur_rank: int = 0, initial_rank: int = 0) -> None:
    """Give all ranks the parameters of one."""
    del layout, cur_rank
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(broadcast(parameter, initial_rank))


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


def _get_parallel_mode() -> str:
    return get_auto_parallel_context("parallel_mode")


def _get_gradients_mean() -> bool:
    return get_auto_parallel_context("gradients_mean")


def _get_device_num() -> int:
    return get_group_size()


def _get_global_rank() -> int:
    return get_rank()


def _get_full_batch() -> bool:
    return get_auto_parallel_context("full_batch")


def _get_pipeline_stages() -> int:
    return 1


def _get_enable_parallel_optimizer() -> bool:
    return get_auto_parallel_context("enable_parallel_optimizer")


def __getattr__(name: str) -> Any:
    raise missing_name("parallel", name, __all__)


class AutoParallel(_AutoParallel):
    """`msrun.runtime.AutoParallel`, whose results print as numbers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step function, or the network on this rank's part."""
        return as_results(super().forward(*args, **kwargs))
