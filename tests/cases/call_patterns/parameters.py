"""Which parameters take part: frozen, unused, tied, used by a later call."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from torch import Tensor, nn

from call_patterns.pattern import Calls, assert_close, assert_gradients, batch, both, mine, pattern, seeded, whole
from msrun.runtime import AutoParallel, no_init_parameters, shard


@pattern
def frozen_parameters_get_no_gradient() -> None:
    serial, network, step = both()
    for n in (serial, network):
        n.layer1.requires_grad_(requires_grad=False)
    x, y = batch()
    step(mine(x), mine(y)).backward()
    F.mse_loss(serial(x), y).backward()
    assert_gradients(network, serial)


@pattern
def parameters_unfrozen_later_get_gradients() -> None:
    serial, network, step = both()
    x, y = batch()
    for n in (serial, network):
        n.layer1.requires_grad_(requires_grad=False)
    step(mine(x), mine(y)).backward()
    for n in (serial, network):
        n.layer1.requires_grad_()
        n.zero_grad()
    step(mine(x), mine(y)).backward()
    F.mse_loss(serial(x), y).backward()
    assert_gradients(network, serial)


@pattern
def parameter_that_the_loss_does_not_use_stays_as_it_is() -> None:
    network = seeded(
        lambda: Calls(lambda s, x, y: F.mse_loss(s.used(x), y), used=nn.Linear(16, 4), unused=nn.Linear(8, 8))
    )
    before = network.unused.weight.detach().clone()
    step = AutoParallel(network).hsdp(threshold=0)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    step(*map(mine, batch())).backward()
    optimizer.step()
    assert network.unused.weight.grad is None
    assert_close(whole(network.unused.weight, before), before)
    by_name = {parameter.name: parameter for parameter in step.plan.parameters}
    assert by_name["unused.weight"].group == -1
    assert "unused" in next(line for line in step.plan.explain().splitlines() if "unused.weight" in line)


def _with_a_head(self: Any, x: Tensor, part: str) -> Tensor:
    hidden = self.body(x)
    return self.head(hidden).pow(2).mean() + hidden.mean() if part == "head" else hidden.mean()


@pattern
def part_used_only_by_a_later_call_trains_then() -> None:
    serial = seeded(lambda: Calls(_with_a_head, body=nn.Linear(16, 8), head=nn.Linear(8, 4)))
    network = copy.deepcopy(serial)
    step = AutoParallel(network).hsdp(threshold=0)
    x, _ = batch()
    step(mine(x), "body").backward()
    assert network.head.weight.grad is None
    network.zero_grad()
    step(mine(x), "head").backward()
    serial(x, "head").backward()
    assert_gradients(network, serial)


@pattern
def part_with_a_strategy_that_the_first_call_does_not_use_trains_later_from_where_it_is_stored() -> None:
    serial = seeded(lambda: Calls(_with_a_head, body=nn.Linear(16, 8), head=nn.Linear(8, 4)))
    network = copy.deepcopy(serial)
    shard(network.head, ((1, 4), (1, 4)))
    step = AutoParallel(network)
    x, _ = batch()
    step(mine(x), "body")
    step(mine(x), "head").backward()
    serial(x, "head").backward()
    assert network.head.weight.shape == serial.head.weight.shape
    assert_gradients(network, serial)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).pow(2).mean()


@pattern
def tied_weights_stay_tied_and_get_both_gradients() -> None:
    serial = seeded(Tied)
    network = copy.deepcopy(serial)
    step = AutoParallel(network).hsdp(threshold=0)
    x, _ = batch()
    step(mine(x)).backward()
    serial(x).backward()
    assert network.first.weight is network.second.weight
    assert_gradients(network, serial)


@pattern
def tied_weights_of_a_deferred_network_stay_tied() -> None:
    serial = seeded(Tied)
    with no_init_parameters():
        network = seeded(Tied)
    step = AutoParallel(network).hsdp(threshold=0)
    x, _ = batch()
    assert_close(step(mine(x)).detach(), serial(x).detach())
    assert network.first.weight is network.second.weight


@pattern
def weight_that_two_operators_want_cut_differently_gets_both_gradients() -> None:
    serial = seeded(Tied)
    network = copy.deepcopy(serial)
    shard(network.first, ((1, 1), (4, 1), (4,)))
    shard(network.second, ((1, 4), (1, 4)))
    step = AutoParallel(network)
    x, _ = batch()
    loss = step(mine(x))
    loss.backward()
    right = serial(x)
    right.backward()
    assert_close(loss.detach(), right.detach())
    assert network.first.weight is network.second.weight
    assert local(network.first.weight).numel() * 4 == serial.first.weight.numel()
    assert_gradients(network, serial)


@pattern
def recurrent_network_trains_as_on_one_process() -> None:
    serial = seeded(
        lambda: Calls(
            lambda s, x: s.out(s.lstm(x)[0]).pow(2).mean(), lstm=nn.LSTM(4, 8, batch_first=True), out=nn.Linear(8, 2)
        )
    )
    network = copy.deepcopy(serial)
    step = AutoParallel(network).hsdp(threshold=0)
    x = batch()[0].reshape(8, 4, 4)
    loss = step(mine(x))
    loss.backward()
    right = serial(x)
    right.backward()
    assert_close(loss.detach(), right.detach())
    assert_gradients(network, serial)
