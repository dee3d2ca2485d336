"""Degrees: into what a training step is divided, beside how its operators are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from msrun.runtime.parallel.batch.accumulation import GradAccumulation
from msrun.runtime.parallel.batch.micro_batch import MicroBatchInterleaved
from msrun.runtime.parallel.pipeline.pipeline import Pipeline
from msrun.runtime.parallel.recomputation import blocks_of, recompute

COPIES = (1, 2)
"""Of a micro batch, that are interleaved: MindSpore's multi-copy has 2."""


@dataclass(frozen=True)
class Degrees:
    """One way to divide a training step."""

    stages: int = 1
    """Of a pipeline, with the schedule 1f1b."""
    micro_batches: int = 1
    copies: int = 1
    shards_optimizer: bool = False
    """Parameters and optimizer state are stored cut: hsdp level1."""
    recomputes: bool = False
    """Every block is computed again before its backward pass."""

    @property
    def parts(self) -> int:
        """Parts of the batch."""
        return self.micro_batches * self.copies

    def __str__(self) -> str:
        """Return what a user would write."""
        words = "net"
        if self.copies > 1:
            words = f"MicroBatchInterleaved({words}, {self.copies})"
        if self.stages > 1:
            words = f"Pipeline({words}, {self.micro_batches})"
        elif self.micro_batches > 1:
            words = f"GradAccumulation({words}, {self.micro_batches})"
        words = f"AutoParallel({words})"
        words += f".pipeline({self.stages})" if self.stages > 1 else ""
        words += ".hsdp(threshold=0)" if self.shards_optimizer else ""
        return f"{words}, recompute(block) of every block" if self.recomputes else words

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the network that divides its batch so, its blocks recomputed if they are to be."""
        if self.recomputes:
            for block in blocks_of(network):
                recompute(block)
        if self.copies > 1:
            network = MicroBatchInterleaved(network, self.copies)
        if self.stages > 1:
            return Pipeline(network, self.micro_batches)
        return GradAccumulation(network, self.micro_batches) if self.micro_batches > 1 else network


def divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to a limit, ascending."""
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def degrees_of_parts(parts: int, stages: int) -> Iterator[tuple[int, int]]:
    """Yield micro batches and copies that make so many parts; 1f1b needs as many micro batches as stages."""
    for copies in COPIES:
        if parts % copies == 0 and (stages == 1 or parts // copies >= stages):
            yield parts // copies, copies
