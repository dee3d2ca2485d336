"""A small network in every layout that cuts it, beside the same one in one process."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import AutoParallel, Pipeline, WithLoss, shard


class Net(nn.Module):
    def __init__(self, seed=0, hidden=16):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.norm, self.b = nn.Linear(8, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 8)
        self.register_buffer("seen", torch.zeros(3))
        self.double()

    def forward(self, x):
        return self.b(self.norm(self.a(x)).tanh())


def whole_batch(network):
    return AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch")


def hsdp(network):
    return whole_batch(network).hsdp(threshold=0)


def columns(network):
    shard(network.a, ((1, 1), (2, 1), (2,)))
    return whole_batch(network)


def stages(network):
    config = {"a": 0, "norm" if hasattr(network, "norm") else "middle": 0, "b": 1}
    call = Pipeline(WithLoss(network, F.mse_loss), 2, stage_config=config)
    return AutoParallel(call).dataset_strategy("full_batch").pipeline(2)


def replicas(network):
    return AutoParallel(WithLoss(network, F.mse_loss), "data_parallel")


def fsdp2(network):
    return replicas(network).hsdp(threshold=0, optimizer_level="level3")


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(2))


def backward(step, right, seed=1, *, data=batch, give=tuple, loss_of=F.mse_loss):
    *inputs, y = data(seed)
    loss, expected = step(*give((*inputs, y))), loss_of(right(*inputs), y)
    loss.backward()
    expected.backward()
    assert_close(loss.detach(), expected.detach())


def train(step, right, *optimizers, data=batch, give=tuple, between=lambda: None, steps=2, **words):
    """Take the same steps on both sides, and compare losses and weights.

    Args:
        data: seed -> the whole batch, with what is to come out as the last.
        give: whole batch -> what this rank passes.
        between: called after each backward pass.
    """
    for seed in range(steps):
        backward(step, right, seed, data=data, give=give, **words)
        between()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(step, right)


def assert_same(step, right):
    """Compare weights, which may have other names."""
    for value, expected in zip(step.state_dict().values(), right.state_dict().values(), strict=True):
        assert_close(value, expected)


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_close(one, other):
    torch.testing.assert_close(whole(one), other, rtol=1e-9, atol=1e-11)


def assert_state(mine, right):
    assert list(mine) == list(right)
    for name, value in right.items():
        assert_close(mine[name], value.detach())
