"""What tests of the modes share: one network, its batches, one process as the oracle."""

import functools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import get_group_size, get_rank, optim, value_and_grad

BATCH = 16
STEPS = 20


class Network(nn.Module):
    """The first weight is above the threshold of 1 KB in both types, the rest is below it."""

    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(24, 32)
        self.layer2 = nn.Linear(32, 6)

    def forward(self, x):
        return self.layer2(F.relu(self.layer1(x)))


def make_network(dtype=torch.float64):
    torch.manual_seed(5)
    return Network().to(dtype)


def batches(dtype=torch.float64, steps=STEPS, rows=BATCH):
    generator = torch.Generator().manual_seed(6)
    for _ in range(steps):
        images = torch.randn(rows, 24, generator=generator, dtype=torch.float64).to(dtype)
        yield images, torch.randint(0, 6, (rows,), generator=generator)


def mine(tensor):
    """Return this rank's part of a batch."""
    return tensor.chunk(get_group_size())[get_rank()]


def train(step, optimizer, parts, dtype=torch.float64, steps=STEPS):
    """Train in an ordinary torch loop."""
    losses = []
    for images, labels in batches(dtype, steps):
        loss = step(parts(images), parts(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@functools.cache
def serial(factor=1.0, dtype=torch.float64):
    """One process, with `factor` times the gradient."""
    network = make_network(dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05 * factor, momentum=0.9)
    losses = train(lambda x, y: F.cross_entropy(network(x), y), optimizer, lambda tensor: tensor, dtype)
    return losses, network


def momentum(network):
    return optim.Momentum(network.parameters(), 0.05, 0.9)


def step_function(network, optimizer):
    """Return a step with value_and_grad that also looks like a loss to `train`, whose own step then does nothing."""
    gradients_of = value_and_grad(lambda x, y: F.cross_entropy(network(x), y), None, list(network.parameters()))

    def step(images, labels):
        loss, gradients = gradients_of(images, labels)
        optimizer(gradients)
        return loss

    return step
