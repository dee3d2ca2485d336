"""value_and_grad, and an optimizer that takes its gradients."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from call_patterns.pattern import Mlp, assert_close, batch, mine, pattern, seeded, whole
from msrun.runtime import AutoParallel, no_init_parameters, optim, value_and_grad


@pattern
def gradients_of_arguments_are_those_of_this_ranks_part() -> None:
    serial = seeded(Mlp)
    network = copy.deepcopy(serial)
    gradients_of = value_and_grad(lambda x, y: F.mse_loss(network(x), y), (0, 1), list(network.parameters()))
    step = AutoParallel(lambda x, y: gradients_of(x, y))
    x, y = batch()
    loss, (inputs, weights) = step(mine(x), mine(y))
    x.requires_grad_()
    y.requires_grad_()
    right = F.mse_loss(serial(x), y)
    right.backward()
    assert_close(loss, right.detach())
    assert_close(inputs[0], mine(x.grad))
    assert_close(inputs[1], mine(y.grad))
    assert len(weights) == 4
    assert_close(weights[0], serial.layer1.weight.grad)


@pattern
def gradient_of_a_number_is_whole_on_every_rank() -> None:
    serial = seeded(Mlp)
    network = copy.deepcopy(serial)
    gradients_of = value_and_grad(lambda x, t: (network(x) * t).pow(2).mean(), 1)
    x, _ = batch()
    number = torch.tensor(1.5)
    _, gradient = AutoParallel(lambda x, t: gradients_of(x, t))(mine(x), number)
    number.requires_grad_()
    (serial(x) * number).pow(2).mean().backward()
    assert_close(gradient, number.grad)


@pattern
def other_results_come_back_beside_the_loss() -> None:
    serial = seeded(Mlp)
    network = copy.deepcopy(serial)

    def forward(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = network(x)
        return F.cross_entropy(scores, labels), (scores.argmax(1) == labels).sum(), scores

    gradients_of = value_and_grad(forward, None, list(network.parameters()), has_aux=True)
    x, _ = batch()
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    (loss, right_ones, scores), gradients = AutoParallel(lambda x, y: gradients_of(x, y)).hsdp(threshold=0)(
        mine(x), mine(labels)
    )
    expected = serial(x)
    assert_close(loss, F.cross_entropy(expected, labels).detach())
    assert int(right_ones) == int((expected.argmax(1) == labels).sum())
    assert_close(scores, mine(expected).detach())
    assert [tuple(g.shape) for g in gradients] == [tuple(p.shape) for p in network.parameters()]


@pattern
def optimizer_of_ours_takes_the_gradients_of_the_parts() -> None:
    serial = seeded(Mlp)
    with no_init_parameters():
        network = seeded(Mlp)
        optimizer = optim.Momentum(network.parameters(), 0.1, 0.9)
    gradients_of = value_and_grad(lambda x, y: F.mse_loss(network(x), y), None, list(network.parameters()))

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss, gradients = gradients_of(x, y)
        optimizer(gradients)
        return loss

    step = AutoParallel(train).hsdp(threshold=0)
    right = torch.optim.SGD(serial.parameters(), 0.1, momentum=0.9)
    for seed in range(3):
        x, y = batch(seed=seed)
        loss = step(mine(x), mine(y))
        expected = F.mse_loss(serial(x), y)
        expected.backward()
        right.step()
        right.zero_grad()
        assert_close(loss, expected.detach())
    assert_close(whole(network.layer1.weight, serial.layer1.weight), serial.layer1.weight.detach())
