"""Random numbers in the network: torch's, numpy's and Python's."""

import random

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from training_habits.trial import Criterion, Step, habit, train


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
