"""Networks that draw random numbers have one process' losses on two ranks, whatever the way."""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from on_ranks import on_ranks
from torch import nn

from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    Pipeline,
    get_rank,
    load_checkpoint,
    no_init_parameters,
    recompute,
    save_checkpoint,
    shard,
)
from msrun.runtime.nn.random_stream import take_stream_state

STEPS, ROWS, TOKENS, WIDTH = 3, 8, 3, 6


class Vae(nn.Module):
    """Reparametrisation by randn_like."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4)
        self.mean, self.spread = nn.Linear(4, 2), nn.Linear(4, 2)
        self.out = nn.Linear(2, WIDTH)

    def forward(self, x):
        hidden = self.inner(x).tanh()
        mean, spread = self.mean(hidden), self.spread(hidden)
        z = mean + torch.randn_like(spread) * (0.5 * spread).exp()
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return F.mse_loss(self.out(z), x) + divergence


def stochastic_depth(x, p, mode):
    """Drop rows, or the whole batch, with memory that is not made of the input."""
    size = [x.shape[0], *[1] * (x.ndim - 1)] if mode == "row" else [1] * x.ndim
    noise = torch.empty(size, dtype=x.dtype, device=x.device)
    noise = noise.bernoulli_(1 - p)
    noise.div_(1 - p)
    return x * noise


class Kinds(nn.Module):
    """Other ways to draw; rows of the batch stand first, second, or are joined with others; one draw has none."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(5, WIDTH))

    def forward(self, x):
        y = self.inner(x)
        y = y + stochastic_depth(y.tanh(), 0.4, "row") + stochastic_depth(y.tanh(), 0.2, "batch")
        y = y + 0.1 * torch.distributions.Normal(y, 1.0, validate_args=False).rsample()
        y = F.rrelu(y, training=True) * torch.bernoulli(torch.full_like(y, 0.8))
        y = y * (torch.rand(y.shape[0], 1, dtype=y.dtype) < 0.9)
        y = y + 0.1 * torch.empty_like(y).exponential_(2.0) + 0.1 * torch.normal(y.detach(), 0.5)
        y = torch.stack([y, y * 2, y * 3], 1)
        y = y + torch.rand_like(y.transpose(0, 1)).transpose(0, 1) + torch.randn_like(y.flatten(0, 1)).view(y.shape)
        order = torch.rand(y.shape[:2], dtype=y.dtype).argsort(1)
        y = y.gather(1, order.unsqueeze(-1).expand_as(y)) * torch.arange(1, TOKENS + 1).view(-1, 1)
        y = y + torch.randint_like(y, 3) + torch.empty_like(y).uniform_(-1, 1) + torch.empty_like(y).normal_(0.2, 0.1)
        weight = self.scale + 0.1 * torch.randn_like(self.scale)
        return (y.unsqueeze(2) * weight).square().mean() + torch.native_dropout(y, 0.5, train=True)[0].mean()


NETWORKS = {"vae": Vae, "kinds": Kinds}


def _two_copies(network):
    return MicroBatchInterleaved(network, 2)


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    divide: Callable[[nn.Module], nn.Module] = lambda network: network
    hsdp: Mapping[str, Any] | None = None
    mode: str = "semi_auto"
    is_full_batch: bool = False
    strategy: Any = None
    """Of the layer `inner`."""
    recomputes: bool = False
    is_deferred: bool = False
    stages: int = 1


WAYS = [
    Way("data-parallel"),
    Way("columns", is_full_batch=True, strategy=((1, 1), (2, 1), (2,))),
    Way("rows", strategy=((1, 2), (1, 2), (1,))),
    Way("hsdp", hsdp={"threshold": 0, "optimizer_level": "level3"}),
    Way("two-copies", _two_copies),
    Way("two-micro-batches", lambda network: GradAccumulation(network, 2), hsdp={"threshold": 0}),
    Way("copies-of-micro-batches", lambda network: GradAccumulation(_two_copies(network), 2)),
    Way("recomputed", recomputes=True),
    Way("pipeline", lambda network: Pipeline(network, 2), is_full_batch=True, stages=2),
    Way("without-capture", mode="data_parallel"),
    Way("without-capture-deferred", mode="data_parallel", is_deferred=True),
    Way("without-capture-recomputed-two-copies", _two_copies, mode="data_parallel", recomputes=True),
    Way("without-capture-level3", mode="data_parallel", hsdp={"threshold": 0, "optimizer_level": "level3"}),
]


SCENARIOS = [*(("kinds", way) for way in WAYS), *(("vae", way) for way in WAYS[:2])]


def losses_of(name, way, take, *, saved=None, loaded=None):
    """Return the losses of some steps of a network, trained in one way.

    Args:
        take: gives a rank's part of a batch.
        saved: where a checkpoint goes after the first step.
        loaded: checkpoint to go on from, after the first step.
    """
    torch.manual_seed(3 if loaded is None else 1234)
    with no_init_parameters() if way.is_deferred else nullcontext():
        network = NETWORKS[name]().double()
    if way.strategy is not None:
        shard(network.inner, way.strategy)
    if way.recomputes:
        recompute(network)
    step = AutoParallel(way.divide(network), way.mode)
    if way.mode == "semi_auto":
        step.dataset_strategy("full_batch" if way.is_full_batch else "data_parallel")
    if way.hsdp is not None:
        step.hsdp(**way.hsdp)
    if way.stages > 1:
        step.pipeline(stages=way.stages)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    losses = []
    if loaded is not None:
        load_checkpoint(loaded, network, optimizer)
    for number in range(STEPS):
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
        if loaded is not None and number == 0:
            continue
        loss = step(x if way.is_full_batch else take(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if saved is not None and number == 0:
            save_checkpoint(network, saved, optimizer)
    return losses


@on_ranks(2, slow=True)
def test_stream_is_a_step_further_on_every_rank_of_a_pipeline_also_where_nothing_is_drawn():
    """After a call without gradients and two steps of a network whose last stage alone draws."""
    torch.manual_seed(3 + get_rank())
    network = NETWORKS["vae"]().double().eval()
    step = AutoParallel(Pipeline(network, 2)).dataset_strategy("full_batch").pipeline(stages=2)
    x = torch.ones(8, 6, dtype=torch.float64)
    with torch.no_grad():
        step(x)
    for _ in range(2):
        step(x).backward()
    assert take_stream_state(network.parameters()) == [3, 3]


@functools.cache
def losses_alone(name):
    return losses_of(name, Way("one process"), lambda tensor: tensor)


@pytest.fixture
def right(name):
    """Losses of one process, with torch's own autograd and no division of the batch."""
    return losses_alone(name)


@on_ranks(2)
@pytest.mark.parametrize(("name", "way"), slow_but(["vae/columns"], SCENARIOS))
def test_losses_are_those_of_one_process(ranks, right, name, way):
    assert len(set(right)) == STEPS
    torch.rand(ranks.rank + 1)  # what a rank draws for itself does not matter
    assert losses_of(name, way, ranks.part) == pytest.approx(right, rel=1e-10, abs=0)


@on_ranks(2, slow=True)
@pytest.mark.parametrize("name", ["kinds"])
def test_run_that_goes_on_from_a_checkpoint_draws_as_one_that_never_stopped(ranks, tmp_path, right, name):
    """Optimizer parallel goes on with what data parallel has saved."""
    assert losses_of(name, Way("first"), ranks.part, saved=tmp_path / "first") == pytest.approx(right, rel=1e-10)
    level3 = Way("level3", hsdp={"threshold": 0, "optimizer_level": "level3"})
    found = losses_of(name, level3, ranks.part, loaded=tmp_path / "first")
    assert found == pytest.approx(right[1:], rel=1e-10)
