"""value_and_grad on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import value_and_grad


def test_weight_that_was_frozen_since_is_refused_by_its_number() -> None:
    network = nn.Linear(2, 1)
    step = value_and_grad(lambda x: network(x).sum(), None, list(network.parameters()))
    _, gradients = step(torch.ones(3, 2))
    assert gradients[1].tolist() == [3.0]
    network.bias.requires_grad = False
    with pytest.raises(
        StrategyError, match=r"weights\[1\] of 2 does not require a gradient; call value_and_grad again"
    ):
        step(torch.ones(3, 2))
