"""Clipping by the global norm in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from msrun.errors import ParallelError, StrategyError
from msrun.runtime import (
    clip_by_global_norm,
    clip_grad_norm_,
)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_clipping_in_one_process_is_torchs(norm_type: float, max_norm: float) -> None:
    torch.manual_seed(0)
    mine, right = nn.Linear(3, 5).double(), nn.Linear(3, 5).double()
    gradients = [torch.randn_like(parameter) for parameter in mine.parameters()]
    for network in (mine, right):
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
    norm = clip_grad_norm_(mine.parameters(), max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(right.parameters(), max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    clipped = clip_by_global_norm(gradients, max_norm, norm_type)
    for one, two, other in zip(mine.parameters(), clipped, right.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=0)
        torch.testing.assert_close(two, other.grad, rtol=1e-12, atol=0)


def test_tied_parameters_and_those_without_gradient_count_once_and_not_at_all() -> None:
    tied, without = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    tied.grad = torch.full((4,), 3.0)
    assert float(clip_grad_norm_([tied, tied, without], 3.0)) == 6.0
    torch.testing.assert_close(tied.grad, torch.full((4,), 1.5), rtol=1e-6, atol=0)


def test_short_gradients_are_measured_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(2048, dtype=torch.bfloat16))
    parameter.grad = torch.full((2048,), 1.0, dtype=torch.bfloat16)
    assert float(clip_grad_norm_(parameter, 1e9)) == pytest.approx(math.sqrt(2048), rel=1e-6)


@pytest.mark.parametrize("norm_type", [0.0, 0.5, -1.0, math.nan, "two", True])
def test_norms_that_are_none_are_refused(norm_type: Any) -> None:
    with pytest.raises(StrategyError, match="must be 1 or more, or infinity"):
        clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0, norm_type)


def test_norm_that_is_not_finite_is_an_error_when_asked_for() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), math.inf)
    with pytest.raises(ParallelError, match="the norm is inf"):
        clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
