"""Which parameters travel in one message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from placed_parameters import placed
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import set_comm_fusion
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.parallel.parameters.fusion import BUCKET_BYTES, fusion_id_of, group_parameters
from msrun.runtime.sharding.layout import Axes

MB = 1024 * 1024


def stored(
    megabytes: float = 1,
    fusion_id: int | None = None,
    *,
    shard_axes: Axes = (),
    dtype: torch.dtype = torch.float32,
    trainable: bool = True,
    partial_axes: Axes = (0,),
) -> tuple[PlacedParameter, Axes]:
    count = int(megabytes * MB) // torch.empty(0, dtype=dtype).element_size()
    parameter = nn.Parameter(torch.empty(count, dtype=dtype, device="meta"), trainable)
    item = placed("p", parameter, (count,), shard_axes=shard_axes, fusion_id=fusion_id)
    return item, partial_axes


@pytest.mark.parametrize(
    ("parameters", "groups"),
    [
        ([], []),
        ([stored()] * 3, [[0, 1, 2]]),
        ([stored(10)] * 3, [[0, 1], [2]]),
        ([stored(25), stored(1)], [[0], [1]]),
        ([stored(30), stored(1), stored(24)], [[0], [1, 2]]),
        ([stored(fusion_id=0)] * 3, [[0], [1], [2]]),
        ([stored(fusion_id=1), stored(fusion_id=2), stored(fusion_id=1)], [[0, 2], [1]]),
        ([stored(20, 1), stored(20, 1), stored(20, 1)], [[0, 1, 2]]),
        ([stored(fusion_id=1), stored(), stored(fusion_id=0)], [[0], [1], [2]]),
        ([stored(shard_axes=(0,)), stored(), stored(shard_axes=(0,))], [[0, 2], [1]]),
        ([stored(partial_axes=(0,)), stored(partial_axes=(0, 1))], [[0], [1]]),
        ([stored(), stored(dtype=torch.bfloat16)], [[0], [1]]),
        ([stored(), stored(trainable=False)], [[0], [1]]),
        ([stored(fusion_id=3), stored(fusion_id=3, dtype=torch.float64)], [[0], [1]]),
    ],
)
def test_parameters_that_are_alike_travel_together(parameters: Any, groups: list[list[int]]) -> None:
    assert group_parameters(parameters) == groups


def test_bucket_has_the_size_of_ddps() -> None:
    assert BUCKET_BYTES == 25 * MB


def test_numbers_are_written_on_trainable_parameters_and_later_calls_win() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[0].bias.requires_grad_(requires_grad=False)
    assert set_comm_fusion(network, 1) is network
    set_comm_fusion(network[1], 2)
    assert fusion_id_of(network[0].weight) == 1
    assert fusion_id_of(network[0].bias) is None
    assert fusion_id_of(network[1].weight) == fusion_id_of(network[1].bias) == 2


def test_without_recursion_only_own_parameters_get_the_number() -> None:
    network = nn.Sequential(nn.Linear(2, 2))
    set_comm_fusion(network, 1, recurse=False)
    assert fusion_id_of(network[0].weight) is None


@pytest.mark.parametrize("number", [-1, 1.0, True, "1", None])
def test_number_that_is_not_whole_or_negative_is_refused(number: Any) -> None:
    with pytest.raises(StrategyError, match="must be a whole number, 0 or more; 0 never fuses"):
        set_comm_fusion(nn.Linear(2, 2), number)
