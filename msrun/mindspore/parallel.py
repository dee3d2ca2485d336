"""AutoParallel and what goes with it, under MindSpore's paths."""

from __future__ import annotations

from typing import Any

from msrun.mindspore.tensor import as_results
from msrun.runtime import AutoParallel as _AutoParallel
from msrun.runtime import GradAccumulation, Layout, MicroBatchInterleaved, Pipeline, shard

__all__ = ["AutoParallel", "GradAccumulation", "Layout", "MicroBatchInterleaved", "Pipeline", "PipelineCell", "shard"]

PipelineCell = Pipeline


class AutoParallel(_AutoParallel):
    """`msrun.runtime.AutoParallel`, whose results print as numbers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step function, or the network on this rank's part."""
        return as_results(super().forward(*args, **kwargs))
