"""Hybrid parallel in one process: operators and marks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    layerwise_parallel,
    reduce_scatter,
)
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import find_target


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
