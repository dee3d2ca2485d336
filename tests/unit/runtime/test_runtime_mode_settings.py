"""Settings of hybrid parallel and of the parallel optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import (
    AutoParallel,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    layerwise_parallel,
    reduce_scatter,
)
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec, choose_shard_axes
from msrun.runtime.sharding.layout import Axes, TensorLayout, build_mesh


def test_operators_return_their_input_in_a_world_of_one() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    for call in (all_reduce, all_gather, reduce_scatter, broadcast, all_to_all):
        assert call(x) is x


def test_operators_refuse_what_has_no_result_or_no_gradient() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(StrategyError, match=r"op='prod'.*must be sum, max or min"):
        all_reduce(x, "prod")
    with pytest.raises(StrategyError, match=r"reduce_scatter\(op='max'\): must be sum"):
        reduce_scatter(x, "max")
    with pytest.raises(StrategyError, match="root_rank=3"):
        broadcast(x, 3)
    with pytest.raises(StrategyError, match="dimension 2 of a tensor of shape"):
        all_gather(x, 2)


def test_operator_in_a_captured_network_names_the_mode_for_it() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return all_reduce(x)

    with pytest.raises(CaptureError, match='parallel_mode="hybrid_parallel"'):
        capture(find_target(Cut()), [torch.ones(2)], {}, input_shapes=[(2,)], parameter_shapes={})


def test_only_parameters_can_be_marked() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert layerwise_parallel(parameter) is parameter
    with pytest.raises(StrategyError, match=r"mark a torch\.nn\.Parameter"):
        layerwise_parallel(torch.ones(2))  # type: ignore[type-var]


WORLD = build_mesh(32)


def choose(
    spec: HsdpSpec | None,
    layout: TensorLayout,
    shape: tuple[int, ...],
    itemsize: int = 4,
    *,
    opted_out: bool = False,
    partial_axes: Axes = (),
    world: Any = WORLD,
) -> tuple[int, str]:
    """Return over how many ranks a parameter is cut, and the reason."""
    axes, reason = choose_shard_axes(
        spec, world, layout, shape, itemsize, opted_out=opted_out, partial_axes=partial_axes
    )
    return world.extent(axes), reason


# 48 x 64 and 64 x 16 on 32 ranks under ((4, 8), (8, 1)) and ((4, 4), (4, 2)): MindSpore's test_parallel_optimizer.py
FIRST = TensorLayout(((2, 3, 4), ()))
"""48 x 64 cut into 8 rows of parts: 6 rows each, 4 copies."""
SECOND = TensorLayout(((2, 3), (4,)))
"""64 x 16 cut into 4 x 2: 16 rows each, 4 copies."""


@pytest.mark.parametrize(
    ("shard_size", "first", "second"),
    [(-1, 1, 4), (1, 1, 1), (2, 2, 2), (4, 1, 4), (8, 1, 4), (32, 1, 4)],
)
def test_weights_of_mindspores_tests_are_cut_as_there(shard_size: int, first: int, second: int) -> None:
    spec = HsdpSpec(shard_size, 0)
    assert choose(spec, FIRST, (48, 64))[0] == first
    assert choose(spec, SECOND, (64, 16))[0] == second


@pytest.mark.parametrize(("threshold", "parts"), [(0, 8), (64, 8), (71, 8), (72, 8), (73, 1), (100, 1)])
def test_weight_of_72_kb_is_cut_up_to_a_threshold_of_72(threshold: int, parts: int) -> None:
    found, reason = choose(HsdpSpec(-1, threshold), TensorLayout.replicated(2), (96, 192), world=build_mesh(8))
    assert found == parts
    assert reason == ("rows cut over 8 ranks" if parts > 1 else f"72 KB is under the threshold of {threshold} KB")


@pytest.mark.parametrize(
    ("spec", "layout", "shape", "settings", "reason"),
    [
        (None, TensorLayout.replicated(2), (64, 64), {}, "hsdp is off"),
        (HsdpSpec(-1, 0), TensorLayout.replicated(2), (64, 64), {"opted_out": True}, "parallel_optimizer is False"),
        (HsdpSpec(-1, 0), TensorLayout(((0, 1, 2, 3, 4), ())), (64, 64), {}, "no rank holds a copy of it"),
        (HsdpSpec(-1, 0), TensorLayout.replicated(2), (1, 64), {}, "its 1 rows cannot be cut into 32 equal parts"),
        (HsdpSpec(-1, 0), FIRST, (48, 64), {}, "its 6 rows cannot be cut into 4 equal parts"),
        (HsdpSpec(3, 0), TensorLayout.replicated(2), (48, 64), {}, "shard_size 3 cannot be made of its 32 copies"),
        (HsdpSpec(-1, 0), TensorLayout(()), (), {}, "it is a single number"),
        (HsdpSpec(-1, 1), TensorLayout.replicated(1), (10,), {}, "40 B is under the threshold of 1 KB"),
    ],
)
def test_parameter_that_stays_whole_says_why(
    spec: HsdpSpec | None, layout: TensorLayout, shape: tuple[int, ...], settings: dict[str, Any], reason: str
) -> None:
    assert choose(spec, layout, shape, **settings) == (1, reason)


def test_itemsize_counts() -> None:
    whole = TensorLayout.replicated(2)
    assert choose(HsdpSpec(), whole, (128, 128), 4)[0] == 32
    assert choose(HsdpSpec(), whole, (128, 128), 2)[0] == 1


def test_copies_with_equal_gradients_stand_before_those_with_partial_sums() -> None:
    mesh = build_mesh(8)
    axes, _ = choose_shard_axes(
        HsdpSpec(-1, 0), mesh, TensorLayout.replicated(1), (64,), 4, opted_out=False, partial_axes=(0, 1)
    )
    assert axes == (2, 0, 1)


def test_nearest_ranks_share_a_parameter() -> None:
    mesh = build_mesh(8)
    axes, _ = choose_shard_axes(
        HsdpSpec(2, 0), mesh, TensorLayout.replicated(1), (64,), 4, opted_out=False, partial_axes=mesh.axes
    )
    assert [mesh.members(rank, axes) for rank in (0, 3, 6)] == [(0, 1), (2, 3), (6, 7)]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"shard_size": 0}, "hsdp(shard_size=0): must be a whole number above 0, or -1 for all"),
        ({"shard_size": -2}, "hsdp(shard_size=-2)"),
        ({"shard_size": 2.0}, "hsdp(shard_size=2.0)"),
        ({"threshold": -1}, "hsdp(threshold=-1): must be a whole number of KB, 0 or more"),
        ({"threshold": 0.5}, "hsdp(threshold=0.5)"),
        ({"optimizer_level": "level4"}, "must be one of level1, level2, level3"),
    ],
)
def test_values_out_of_range_are_refused_at_once(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        AutoParallel(lambda: None).hsdp(**settings)
    assert text in str(caught.value)


def test_shard_size_beyond_the_world_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"hsdp\(shard_size=128\): there are only 32 ranks"):
        HsdpSpec(128).check_world(32)
    HsdpSpec(32).check_world(32)
    HsdpSpec(3).check_world(32)
