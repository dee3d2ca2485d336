"""MicroBatchInterleaved: several copies of the batch are interleaved, one computes while the other's data travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from msrun.runtime.parallel.batch.divided_batch import DividedBatch
from msrun.runtime.parallel.batch.parts import PartKind, join_results
from msrun.runtime.parallel.scaling import find_compat, part_scale


class MicroBatchInterleaved(DividedBatch):
    """Run `network` on `interleave_num` equal slices of the batch.

    Slice i of every tensor is rows [i * B / n, (i + 1) * B / n) of dimension 0. The result is the mean of the slices'
    results, or with AutoParallel(compat="mindspore") their sum; results that are not scalars are joined along dimension
    0. Inside AutoParallel the copies are interleaved; alone they run one after the other, with the same result.
    Parameter names are those of `network`.

    Raises:
        StrategyError: interleave_num is not a whole number above 0, or does not divide the batch.
    """

    kind: PartKind = "copies"

    def __init__(self, network: nn.Module, interleave_num: int = 2) -> None:
        super().__init__(network, interleave_num, "interleave_num")

    @property
    def interleave_num(self) -> int:
        """The number of copies."""
        return self.parts

    def run_parts(self, call: Callable[..., Any], batches: list[tuple[Any, ...]]) -> Any:
        """Run the copies one after the other."""
        return join_results(self.results_of(call, batches), part_scale(find_compat(), self.parts))
