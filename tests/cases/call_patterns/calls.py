"""One network, several calls and functions of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from call_patterns.pattern import Calls, Mlp, assert_close, batch, both, mine, pattern, refused, seeded, whole
from msrun.errors import CaptureError, StrategyError
from msrun.runtime import AutoParallel, shard, value_and_grad


@pattern
def network_trained_with_its_loss_can_be_called_without_it() -> None:
    serial, network, step = both()
    x, y = batch()
    step(mine(x), mine(y)).backward()
    alone = AutoParallel(network).dataset_strategy("full_batch")
    with torch.no_grad():
        assert_close(alone(x), serial(x).detach())


@pattern
def two_functions_of_one_step_share_their_networks() -> None:
    one, two = seeded(Mlp), seeded(lambda: nn.Linear(4, 4))
    serial_one, serial_two = copy.deepcopy(one), copy.deepcopy(two)

    def first_loss(x: Tensor) -> Tensor:
        return one(x).pow(2).mean()

    def second_loss(x: Tensor) -> Tensor:
        return two(one(x)).abs().mean()

    first = value_and_grad(first_loss, None, list(one.parameters()))
    second = value_and_grad(second_loss, None, list(two.parameters()))

    def train(x: Tensor) -> tuple[Any, Any]:
        return first(x), second(x)

    x, _ = batch()
    (loss, _), (other, gradients) = AutoParallel(train).hsdp(threshold=0)(mine(x))
    assert_close(loss, serial_one(x).pow(2).mean().detach())
    right = serial_two(serial_one(x)).abs().mean()
    assert_close(other, right.detach())
    right.backward()
    assert_close(whole(gradients[0], serial_two.weight), serial_two.weight.grad)


@pattern
def step_function_that_differentiates_nothing_itself_is_refused() -> None:
    network = seeded(Mlp)

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(network(x), y)
        loss.backward()
        return loss

    text = refused(CaptureError, AutoParallel(train), *map(mine, batch()))
    assert "value_and_grad" in text


@pattern
def settings_after_the_first_call_are_refused() -> None:
    _, _, step = both()
    step(*map(mine, batch()))
    assert "set it before" in refused(StrategyError, step.hsdp)
    assert "set it before" in refused(StrategyError, step.dataset_strategy, "full_batch")


@pattern
def strategy_of_a_module_that_is_not_called_is_noted() -> None:
    network = Calls(lambda s, x: s.used(x).mean(), used=nn.Linear(16, 4), unused=nn.Linear(4, 4))
    shard(network.unused, ((1, 1), (4, 1)))
    step = AutoParallel(network)
    step(mine(batch()[0]))
    assert any("unused" in note for note in step.plan.notes)
