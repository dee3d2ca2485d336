"""MicroBatchInterleaved: several copies of the batch take turns, one computes while the other's data travels."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime.nn.dropout_stream import part_of_batch
from msrun.runtime.parallel.scaling import Compat, part_scale

current_compat: ContextVar[Compat] = ContextVar("current_compat", default="torch")
"""Set by AutoParallel while it calls a network."""


class MicroBatchInterleaved(nn.Module):
    """Run `network` on `interleave_num` equal slices of the batch.

    Slice i of every tensor is rows [i * B / n, (i + 1) * B / n) of dimension 0. The result is the mean of the slices'
    results, or with AutoParallel(compat="mindspore") their sum. Inside AutoParallel the copies are interleaved; alone
    they run one after the other, with the same result. Parameter names are those of `network`.

    Raises:
        StrategyError: interleave_num is not a whole number above 0, or does not divide the batch.
    """

    def __init__(self, network: nn.Module, interleave_num: int = 2) -> None:
        super().__init__()
        if isinstance(interleave_num, bool) or not isinstance(interleave_num, int) or interleave_num < 1:
            raise StrategyError(f"MicroBatchInterleaved(interleave_num={interleave_num!r}): a whole number above 0")
        self.interleave_num = interleave_num
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the mean (or sum) of the slices' losses."""
        total: Any = 0
        for index, batch in enumerate(split_batch(inputs, self.interleave_num)):
            with part_of_batch(index, self.interleave_num):
                total = total + self.network(*batch)
        return total * part_scale(current_compat.get(), self.interleave_num)


def split_batch(inputs: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """Return `count` tuples of contiguous slices of dimension 0; what is not a tensor goes to all of them.

    Raises:
        StrategyError: the batch cannot be divided.
    """
    if count == 1:
        return [inputs]
    for value in inputs:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] % count:
            raise StrategyError(
                f"a batch of {value.shape[0]} rows on this rank cannot be cut into {count} equal copies; "
                f"give a batch that {count} divides"
            )
    return [
        tuple(_slice(value, index, count) if isinstance(value, Tensor) and value.dim() else value for value in inputs)
        for index in range(count)
    ]


def _slice(value: Tensor, index: int, count: int) -> Tensor:
    length = value.shape[0] // count
    return torch.narrow(value, 0, index * length, length)
