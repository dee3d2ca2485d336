"""Messages of several parameters: which travel together, and the words that say so."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from placed_parameters import placed
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, set_comm_fusion
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.parallel.parameters.fusion import (
    AUTO_BYTES,
    BUCKET_BYTES,
    MB,
    MessageRule,
    fusion_id_of,
    group_parameters,
    parse_comm_fusion,
)
from msrun.runtime.sharding.layout import Axes


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


def stored_at(megabytes: float, *, cut: bool = False, fusion_id: int | None = None) -> tuple[PlacedParameter, Axes]:
    parameter = nn.Parameter(torch.empty(int(megabytes * MB) // 4, device="meta"))
    axes = (0,) if cut else ()
    return placed("p", parameter, (1,), shard_axes=axes, fusion_id=fusion_id), (0,)


def messages(
    count: int, megabytes: float, config: Any, way: Literal["gather", "reduce"] = "reduce", *, cut: bool = False
) -> list[int]:
    """Return how many parameters of equal size each message carries."""
    parameters = [stored_at(megabytes, cut=cut) for _ in range(count)]
    return [len(group) for group in group_parameters(parameters, way, parse_comm_fusion(config))]


def only(kind: str, mode: str, config: Any) -> dict[str, Any]:
    return {kind: {"mode": mode, "config": config}}


def test_without_configuration_messages_are_as_large_as_ddps() -> None:
    assert parse_comm_fusion(None).allreduce == MessageRule(BUCKET_BYTES, alone_bytes=MB)
    assert messages(10, 5, None) == [5, 5]


@pytest.mark.parametrize("config", [{}, {"openstate": True}, only("allreduce", "auto", None)])
def test_auto_carries_64_mb_and_is_what_a_kind_gets_that_is_left_out(config: Any) -> None:
    assert AUTO_BYTES == 64 * MB
    for kind in ("allreduce", "allgather", "reducescatter"):
        assert getattr(parse_comm_fusion(config), kind) == MessageRule(AUTO_BYTES)
    assert messages(10, 16, config) == [4, 4, 2]


@pytest.mark.parametrize(("limit", "right"), [(1, [1] * 6), (4, [2, 2, 2]), (5, [2, 2, 2]), (12, [6])])
def test_size_divides_in_order_of_use(limit: int, right: list[int]) -> None:
    assert messages(6, 2, only("allreduce", "size", limit)) == right


@pytest.mark.parametrize(
    ("boundaries", "right"),
    [([20, 35], [20, 15, 5]), ([1], [1, 39]), ([20], [20, 20]), ([10, 20, 30, 40], [10] * 4), ([60], [40])],
)
def test_index_makes_one_message_up_to_each_number_and_one_of_the_rest(boundaries: list[int], right: list[int]) -> None:
    assert messages(40, 1, only("allreduce", "index", boundaries)) == right


def test_index_counts_all_reduces_only() -> None:
    parameters = [stored_at(1, cut=index % 2 == 0) for index in range(8)]
    config = parse_comm_fusion(only("allreduce", "index", [1, 3]))
    assert group_parameters(parameters, "reduce", config) == [[0, 2, 4, 6], [1], [3, 5], [7]]


def test_gathers_and_their_gradients_have_sizes_of_their_own() -> None:
    config = {**only("allgather", "size", 4), **only("reducescatter", "size", 1)}
    assert messages(8, 1, config, "gather", cut=True) == [4, 4]
    assert messages(8, 1, config, "reduce", cut=True) == [1] * 8
    assert messages(8, 1, config, "reduce", cut=False) == [8]


def test_closed_state_joins_nothing_not_even_equal_numbers() -> None:
    parameters = [stored_at(1, fusion_id=3), stored_at(1, fusion_id=3), stored_at(1)]
    assert group_parameters(parameters, "reduce", parse_comm_fusion({"openstate": False})) == [[0], [1], [2]]


def test_numbers_of_parameters_go_before_the_configuration() -> None:
    parameters = [stored_at(1, fusion_id=7), stored_at(1), stored_at(1, fusion_id=7), stored_at(1, fusion_id=0)]
    config = parse_comm_fusion(only("allreduce", "size", 1))
    assert group_parameters(parameters, "reduce", config) == [[0, 2], [1], [3]]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([], "comm_fusion([]): must be a dict such as {'openstate': True}, or None"),
        ({"allredcue": {}}, "unknown key 'allredcue' (did you mean allreduce?): use openstate, allreduce, allgather"),
        ({"openstate": 1}, "openstate=1: must be True or False"),
        ({"allreduce": 64}, "allreduce=64: must be a dict of mode and config"),
        ({"allreduce": {"mode": "auto"}}, "allreduce has no 'config'"),
        ({"allgather": {"config": None}}, "allgather has no 'mode'"),
        ({"allgather": {"mode": "auto", "config": None, "x": 1}}, "unknown key 'x' of allgather"),
        (only("allreduce", "bytes", 1), "mode 'bytes' of allreduce: must be auto or size or index"),
        (only("allgather", "index", [1]), "mode 'index' of allgather: must be auto or size"),
        (only("reducescatter", "index", [1]), "mode 'index' of reducescatter: must be auto or size"),
        (only("allreduce", "auto", 64), "config 64 of allreduce: must be None with mode auto"),
        (only("allreduce", "size", 0), "config 0 of allreduce: must be a whole number of MB above 0"),
        (only("allreduce", "size", 1.5), "config 1.5 of allreduce: must be a whole number of MB above 0"),
        (only("allreduce", "size", "1"), "config '1' of allreduce"),
        (only("allreduce", "index", [3, 2]), "config [3, 2] of allreduce: must be ascending whole numbers above 0"),
        (only("allreduce", "index", []), "config [] of allreduce: must be ascending"),
        (only("allreduce", "index", [2, 2]), "config [2, 2] of allreduce: must be ascending"),
        (only("allreduce", "index", 5), "config 5 of allreduce: must be ascending"),
    ],
)
def test_configuration_that_means_nothing_is_refused_in_words(config: Any, text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        AutoParallel(lambda: None).comm_fusion(config)
    assert text in str(caught.value)
