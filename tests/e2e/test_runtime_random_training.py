"""Networks that draw random numbers have one process' losses on two ranks, whatever the way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from on_ranks import Ranks, on_ranks
from torch import Tensor, nn

from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    MicroBatchInterleaved,
    Pipeline,
    get_rank,
    no_init_parameters,
    recompute,
    shard,
)
from msrun.runtime.nn.random_stream import take_stream_state

STEPS, ROWS, TOKENS, WIDTH = 3, 8, 3, 6


class Vae(nn.Module):
    """Reparametrisation by randn_like."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4)
        self.mean, self.spread = nn.Linear(4, 2), nn.Linear(4, 2)
        self.out = nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).tanh()
        mean, spread = self.mean(hidden), self.spread(hidden)
        z = mean + torch.randn_like(spread) * (0.5 * spread).exp()
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return F.mse_loss(self.out(z), x) + divergence


def drop_path(x: Tensor, p: float) -> Tensor:
    """Drop whole rows, as image models do: new memory, then Bernoulli numbers and a division written into it."""
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - p)
    kept.div_(1 - p)
    return x * kept


def stochastic_depth(x: Tensor, p: float, mode: str) -> Tensor:
    """Drop rows, or the whole batch, with memory that is not made of the input."""
    size = [x.shape[0], *[1] * (x.ndim - 1)] if mode == "row" else [1] * x.ndim
    noise = torch.empty(size, dtype=x.dtype, device=x.device)
    noise = noise.bernoulli_(1 - p)
    noise.div_(1 - p)
    return x * noise


class DropPath(nn.Module):
    """Residual blocks some of which fall out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y = x.unsqueeze(1).expand(-1, TOKENS, -1)
        y = y + drop_path(self.inner[0](y).tanh(), 0.3)
        y = y + stochastic_depth(self.inner[1](y).tanh(), 0.4, "row")
        y = y + stochastic_depth(self.inner[2](y).tanh(), 0.2, "batch")
        return F.mse_loss(y, torch.zeros_like(y))


class Gumbel(nn.Module):
    """Choices by gumbel_softmax, soft and hard."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4)
        self.out = nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inner(x)
        soft, hard = F.gumbel_softmax(scores, tau=0.7), F.gumbel_softmax(scores, tau=0.7, hard=True)
        return F.mse_loss(self.out(soft + hard), x)


class Diffusion(nn.Module):
    """Noise and a time for every row, made of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.times = nn.Embedding(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn(x.shape, dtype=x.dtype)
        share = (times.to(x.dtype) / 10).unsqueeze(1)
        found = self.inner(x * (1 - share) + noise * share) + self.times(times)
        return F.mse_loss(found, noise)


class Kinds(nn.Module):
    """Other ways to draw; rows of the batch stand first, second, or are joined with others; one draw has none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
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


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "vae": Vae,
    "drop-path": DropPath,
    "gumbel": Gumbel,
    "diffusion": Diffusion,
    "kinds": Kinds,
}


def _two_copies(network: nn.Module) -> nn.Module:
    return MicroBatchInterleaved(network, 2)


def _two_micro_batches(network: nn.Module) -> nn.Module:
    return GradAccumulation(network, 2)


def _both(network: nn.Module) -> nn.Module:
    return GradAccumulation(MicroBatchInterleaved(network, 2), 2)


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
    Way("full-batch", is_full_batch=True),
    Way("columns", is_full_batch=True, strategy=((1, 1), (2, 1), (2,))),
    Way("rows", strategy=((1, 2), (1, 2), (1,))),
    Way("hsdp", hsdp={"threshold": 0, "optimizer_level": "level3"}),
    Way("two-copies", _two_copies),
    Way("two-micro-batches", _two_micro_batches, hsdp={"threshold": 0}),
    Way("copies-of-micro-batches", _both),
    Way("recomputed", recomputes=True),
    Way("pipeline", lambda network: Pipeline(network, 2), is_full_batch=True, stages=2),
    Way("without-capture", mode="data_parallel"),
    Way("without-capture-deferred", mode="data_parallel", is_deferred=True),
    Way("without-capture-recomputed-two-copies", _two_copies, mode="data_parallel", recomputes=True),
    Way("without-capture-level3", mode="data_parallel", hsdp={"threshold": 0, "optimizer_level": "level3"}),
]


OF_ALL = ("data-parallel", "columns", "two-copies", "without-capture")
SCENARIOS = [(name, way) for name in NETWORKS for way in WAYS if name in ("drop-path", "kinds") or way.name in OF_ALL]
"""Every network in some ways, two networks that have all that is special in every way."""


def layer_of(network: nn.Module) -> nn.Linear:
    inner = network.inner
    return inner[0] if isinstance(inner, nn.ModuleList) else inner


def losses_of(name: str, way: Way, take: Callable[[Tensor], Tensor]) -> list[float]:
    """Return the losses of some steps of a network, trained in one way; `take` gives a rank's part of a batch."""
    torch.manual_seed(3)
    with no_init_parameters() if way.is_deferred else nullcontext():
        network = NETWORKS[name]().double()
    if way.strategy is not None:
        numbers = way.strategy
        if name == "drop-path":  # three dimensions
            numbers = ((numbers[0][0], 1, numbers[0][1]), *numbers[1:])
        shard(layer_of(network), numbers)
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
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
        loss = step(x if way.is_full_batch else take(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@on_ranks(2)
def test_stream_is_a_step_further_on_every_rank_of_a_pipeline_also_where_nothing_is_drawn() -> None:
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
def losses_alone(name: str) -> list[float]:
    return losses_of(name, Way("one process"), lambda tensor: tensor)


@pytest.fixture
def right(name: str) -> list[float]:
    """Losses of one process, with torch's own autograd and no division of the batch."""
    return losses_alone(name)


@on_ranks(2)
@pytest.mark.parametrize(("name", "way"), slow_but(["diffusion/columns"], SCENARIOS))
def test_losses_are_those_of_one_process(ranks: Ranks, right: list[float], name: str, way: Way) -> None:
    assert len(set(right)) == STEPS
    torch.rand(ranks.rank + 1)  # what a rank draws for itself does not matter
    assert losses_of(name, way, ranks.part) == pytest.approx(right, rel=1e-10, abs=0)
