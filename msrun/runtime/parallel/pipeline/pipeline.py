"""Pipeline: a network whose batch goes through it in micro batches, from stage to stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from msrun.errors import StrategyError
from msrun.runtime.parallel.batch.accumulation import GradAccumulation
from msrun.runtime.parallel.batch.divided_batch import DividedBatch
from msrun.runtime.parallel.pipeline.schedule import choose_schedule


@dataclass(frozen=True)
class PipelineSpec:
    """Settings of `AutoParallel.pipeline`.

    Raises:
        StrategyError: a value out of its range.
    """

    stages: int = 1
    """Parts of the world, each of consecutive ranks."""
    scheduler: str = "1f1b"
    interleave: bool = False
    output_broadcast: bool = False
    """Whether results that are no scalars come back on every rank, or only where they are made."""

    def __post_init__(self) -> None:
        if isinstance(self.stages, bool) or not isinstance(self.stages, int) or self.stages < 1:
            raise StrategyError(f"pipeline(stages={self.stages!r}): must be a whole number above 0")
        for name in ("interleave", "output_broadcast"):
            if not isinstance(getattr(self, name), bool):
                raise StrategyError(f"pipeline({name}={getattr(self, name)!r}): must be True or False")
        choose_schedule(self.scheduler, self.interleave)

    def ranks_per_stage(self, world_size: int) -> int:
        """Return the number of ranks of one stage.

        Raises:
            StrategyError: the world cannot be divided.
        """
        if world_size % self.stages:
            raise StrategyError(
                f"pipeline(stages={self.stages}): {world_size} ranks cannot be divided into {self.stages} equal stages"
            )
        return world_size // self.stages


class Pipeline(GradAccumulation):
    """Run `network` (with its loss) on `micro_size` equal slices of the batch, which follow each other through stages.

    Slice i of every tensor is rows [i * B / n, (i + 1) * B / n) of dimension 0. The result is the mean of the slices'
    losses, or with AutoParallel(compat="mindspore") their sum, whose gradient is that of the mean. Inside
    `AutoParallel(...).pipeline(stages=...)` each part of the ranks runs one stage; alone the slices run one after the
    other as those of GradAccumulation, with the same result. Parameter names are those of `network`.
    `Pipeline(WithLoss(net, loss_fn), 4)`, `Pipeline(MicroBatchInterleaved(WithLoss(net, loss_fn), 2), 4)`.

    Args:
        micro_size: number of slices.
        stage_config: module name -> stage, from 0; modules that are not named follow what they read. None cuts the
            network into stages of equal cost.

    Raises:
        StrategyError: a number that is not whole or not above 0, or that does not divide the batch.
    """

    def __init__(self, network: nn.Module, micro_size: int, stage_config: Mapping[str, int] | None = None) -> None:
        super().__init__(network, micro_size)
        for name, stage in (stage_config or {}).items():
            if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
                raise StrategyError(f"stage_config[{name!r}] = {stage!r}: must be a whole number, 0 or more")
        self.stage_config = dict(stage_config or {})


def find_pipeline(wrappers: Sequence[DividedBatch], stages: int) -> Pipeline:
    """Return the Pipeline among the wrappers of a network, outermost first.

    Raises:
        StrategyError: there is none, or several.
    """
    found = [wrapper for wrapper in wrappers if isinstance(wrapper, Pipeline)]
    if len(found) > 1:
        raise StrategyError(f"{len(found)} Pipelines in one network: wrap the whole network, with its loss, in one")
    if not found:
        raise StrategyError(
            f"pipeline(stages={stages}) needs a network that says how its batch is divided: "
            "wrap it in Pipeline(net_with_loss, micro_size)"
        )
    return found[0]
