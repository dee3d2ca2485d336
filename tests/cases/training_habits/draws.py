"""Random numbers in the network: torch's, numpy's and Python's."""

import random
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import (
    GradAccumulation,
    MicroBatchInterleaved,
    load_checkpoint,
    no_init_parameters,
    recompute,
    save_checkpoint,
)
from msrun.runtime.nn.random_stream import take_stream_state
from training_habits.trial import ALONE, CAPTURED, IN_HALVES, MODES, OWN_ROWS, Criterion, Step, habit, sgd, train

WIDTH, TOKENS = 6, 3


def drawn(name, draw, *, draws=True):
    """A habit of drawing in forward: `draw` of what the first layer makes."""

    @habit(name, draws=draws)
    def _(t):
        train(t, Step(lambda s, x, y: F.mse_loss(s.net.b(draw(torch.tanh(s.net.a(x)))), y)))
        t.whole(torch.rand(1), "torch's next number")
        t.whole(random.random(), "Python's next number")
        t.whole(float(np.random.rand()), "numpy's next number")


drawn("draw: dropout", lambda h: F.dropout(h, 0.3))
drawn("draw: dropout of whole rows", lambda h: h * (torch.rand(len(h), 1) > 0.3))
drawn("draw: randn_like", lambda h: h + 0.1 * torch.randn_like(h))
drawn("draw: bernoulli_ and normal_", lambda h: h * torch.empty_like(h).bernoulli_(0.7) + torch.empty(16).normal_())
drawn("draw: numbers for the whole batch at once", lambda h: h * torch.rand(16))
drawn("draw: multinomial", lambda h: h + torch.multinomial(h.detach().softmax(-1), 1))
drawn("draw: randperm mixes the rows", lambda h: 0.7 * h + 0.3 * h[torch.randperm(len(h))])


def _of_its_own(h):
    return h + torch.randn(16, generator=torch.Generator().manual_seed(3))


drawn("draw: a generator of its own", _of_its_own, draws=False)
drawn("draw: random.random", lambda h: h * random.random(), draws=False)
drawn("draw: np.random.rand", lambda h: h * float(np.random.rand()), draws=False)
drawn("draw: default_rng of numpy, made anew", lambda h: h * float(np.random.default_rng(3).random()), draws=False)


@habit("draw: nn.Dropout in evaluation")
def _(t):
    train(t, Criterion(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))).eval())


# -- networks that draw in several places ------------------------------------------------------------------------------


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


def _rows(t):
    return (t.randn(8, WIDTH),)


def drawing(name, make, modes=MODES, divide=lambda net: net, *, is_deferred=False):
    """A habit of a network that makes its loss of what it draws; `divide` makes a wrapper of it, or changes it."""

    @habit(f"draw: {name}", modes, draws=True)
    def _(t):
        is_parallel = t.mode not in (ALONE, IN_HALVES)
        with no_init_parameters() if is_parallel and is_deferred else nullcontext():
            net = make()
        train(t, divide(net) if is_parallel else net, batch=_rows)
        t.whole(take_stream_state(net.parameters())[1], "steps of the stream")


def _copies(net):
    return MicroBatchInterleaved(net, 2)


drawing("variational autoencoder", Vae)
drawing("by all names", Kinds)
drawing("by all names, in copies", Kinds, CAPTURED[:3], _copies)
drawing("by all names, in copies of micro batches", Kinds, CAPTURED[:3], lambda net: GradAccumulation(_copies(net), 2))
drawing("by all names, recomputed", Kinds, (*CAPTURED, *OWN_ROWS), recompute)
drawing("by all names, recomputed in copies", Kinds, OWN_ROWS, lambda net: _copies(recompute(net)))
drawing("by all names, without values at first", Kinds, OWN_ROWS, is_deferred=True)


@habit("draw: by all names, going on from a checkpoint", draws=True)
def _(t):
    net = Kinds()
    optimizer = sgd(net)
    train(t, net, batch=_rows, optimizer=lambda _: optimizer, steps=1)
    if t.mode in MODES:  # one process never stops
        save_checkpoint(net, "drawn", optimizer)
        torch.manual_seed(1234)
        net = Kinds()
        optimizer = sgd(net)
        load_checkpoint("drawn", net, optimizer)
    train(t, net, batch=_rows, optimizer=lambda _: optimizer, steps=2)
