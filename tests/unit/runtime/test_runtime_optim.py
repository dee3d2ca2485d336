"""Optimizers that can also be called with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import optim

PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "SGD": (lambda p: optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "SGD with its own default": (lambda p: optim.SGD(p), lambda p: torch.optim.SGD(p, lr=0.1)),
    "SGD with momentum": (
        lambda p: optim.SGD(p, 0.1, 0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True),
    ),
    "Momentum": (
        lambda p: optim.Momentum(p, learning_rate=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "Adam": (lambda p: optim.Adam(p, lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
    "AdamW": (lambda p: optim.AdamW(p, weight_decay=0.1), lambda p: torch.optim.AdamW(p, weight_decay=0.1)),
}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS.keys())
def test_call_with_gradients_does_what_torch_does_with_grad(
    ours: Callable[[Any], Any], theirs: Callable[[Any], Any]
) -> None:
    torch.manual_seed(0)
    left = nn.Linear(3, 2)
    right = nn.Linear(3, 2)
    right.load_state_dict(left.state_dict())
    mine, peer = ours(left.parameters()), theirs(right.parameters())
    for _ in range(3):
        gradients = [torch.randn_like(parameter) for parameter in left.parameters()]
        mine(gradients)
        for parameter, gradient in zip(right.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        peer.step()
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.grad is None, "the next step starts without gradients"


def test_step_works_as_in_torch() -> None:
    network = nn.Linear(3, 2)
    optimizer = optim.Momentum(network.parameters(), 0.1, 0.9)
    before = network.weight.detach().clone()
    network(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(network.weight.detach(), before - 0.1)


def test_gradients_follow_the_order_of_parameter_groups() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([{"params": [second], "lr": 1.0}, {"params": [first], "lr": 10.0}])
    optimizer((torch.ones(3), torch.ones(2)))
    assert second.tolist() == [-1.0] * 3
    assert first.tolist() == [-10.0] * 2


def test_momentum_is_mindspores() -> None:
    """v = m v + g; w = w - lr v."""
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = optim.Momentum([weight], learning_rate=0.5, momentum=0.1)
    velocity, right = 0.0, 1.0
    for gradient in (2.0, -1.0, 0.5):
        optimizer([torch.tensor([gradient], dtype=torch.float64)])
        velocity = 0.1 * velocity + gradient
        right -= 0.5 * velocity
        assert float(weight.detach()) == pytest.approx(right, rel=1e-12)


def test_wrong_number_of_gradients_is_refused() -> None:
    network = nn.Linear(3, 2)
    with pytest.raises(StrategyError, match="1 gradients for 2 parameters; give one for each, in order"):
        optim.SGD(network.parameters())([torch.zeros(2, 3)])


def test_gradient_of_another_shape_is_refused_and_nothing_moves() -> None:
    network = nn.Linear(3, 2)
    before = network.weight.detach().clone()
    with pytest.raises(StrategyError, match=r"gradient 1 has shape \(3,\) but its parameter \(2,\)"):
        optim.SGD(network.parameters())([torch.ones(2, 3), torch.ones(3)])
    assert torch.equal(network.weight, before)


def test_exported_names() -> None:
    own = {"AdamWeightDecay", "FTRL", "LARS", "Lamb", "LazyAdam", "Momentum", "Optimizer"}
    on_host = {"OptimizerMemory", "memory_of", "offload"}
    assert set(optim.__all__) == {"SGD", "Adam", "AdamW", *own, *on_host}
