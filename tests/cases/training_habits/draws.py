"""Random numbers in the network and beside it: torch's, numpy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from training_habits.losses import Step
from training_habits.trial import Criterion, Mlp, Trial, habit, train


def drawn(name: str, draw: Any, **options: Any) -> None:
    """A habit of drawing in forward: `draw` of what the first layer makes."""

    @habit(name, **options)
    def _(t: Trial) -> None:
        def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.net.b(draw(torch.tanh(self.net.a(x)))), y)

        train(t, Step(forward))
        t.whole(torch.rand(1), "torch's next number")
        t.whole(random.random(), "Python's next number")
        t.whole(float(np.random.rand()), "numpy's next number")


drawn("draw: dropout", lambda h: F.dropout(h, 0.3), draws=True)
drawn("draw: dropout of whole rows", lambda h: h * (torch.rand(len(h), 1) > 0.3), draws=True)
drawn("draw: randn_like", lambda h: h + 0.1 * torch.randn_like(h), draws=True)
drawn(
    "draw: bernoulli_ and normal_",
    lambda h: h * torch.empty_like(h).bernoulli_(0.7) + torch.empty(16).normal_(),
    draws=True,
)
drawn("draw: Gumbel softmax", lambda h: F.gumbel_softmax(h, tau=0.7), draws=True)
drawn("draw: numbers for the whole batch at once", lambda h: h * torch.rand(16), draws=True)
drawn("draw: dropout of zero", lambda h: F.dropout(h, 0.0))
drawn("draw: dropout that is off", lambda h: F.dropout(h, 0.5, training=False))
drawn("draw: multinomial", lambda h: h + torch.multinomial(h.detach().softmax(-1), 1), draws=True)
drawn("draw: randperm mixes the rows", lambda h: 0.7 * h + 0.3 * h[torch.randperm(len(h))], draws=True)
drawn("draw: a generator of its own", lambda h: h + torch.randn(16, generator=torch.Generator().manual_seed(3)))
drawn("draw: random.random", lambda h: h * random.random())
drawn("draw: random.uniform", lambda h: h * random.uniform(0.5, 1.5))
drawn("draw: random.randint", lambda h: h.roll(random.randint(0, 15), 1))
drawn("draw: random.choice", lambda h: h * random.choice([0.5, 1.0, 2.0]))
drawn("draw: random.gauss", lambda h: h + random.gauss(0, 1))
drawn("draw: a branch by random.random", lambda h: h if random.random() < 0.5 else -h)
drawn("draw: np.random.rand", lambda h: h * float(np.random.rand()))
drawn("draw: np.random.permutation of columns", lambda h: h[:, torch.from_numpy(np.random.permutation(16))])
drawn("draw: default_rng of numpy, made anew", lambda h: h * float(np.random.default_rng(3).random()))


@habit("draw: layer dropped by torch.rand")
def _(t: Trial) -> None:
    drops = iter([True, False, True])

    def forward(self: Step, x: Tensor, y: Tensor, dropped: bool) -> Tensor:
        h = torch.tanh(self.net.a(x))
        return F.mse_loss(self.net.b(h if dropped else h + self.more(h)), y)

    net = Step(forward, more=nn.Linear(16, 16))
    train(t, net, loss_of=lambda step, x, y: step(x, y, next(drops)))


@habit("draw: layer dropped by Python's numbers outside")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor, scale: float) -> Tensor:
        return F.mse_loss(self.net(x) * scale, y)

    train(t, Step(forward), loss_of=lambda step, x, y: step(x, y, random.choice([0.5, 1.0])))


@habit("draw: mixup of the batch outside")
def _(t: Trial) -> None:
    """Within this rank's rows, by the same order on both."""

    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        share = float(np.random.beta(0.5, 0.5))
        return step(share * x + (1 - share) * x.flip(1), y)

    train(t, Criterion(Mlp()), loss_of=loss_of)


@habit("draw: augmentation with numpy outside")
def _(t: Trial) -> None:
    def loss_of(step: Any, x: Tensor, y: Tensor) -> Tensor:
        return step(torch.from_numpy(x.numpy() * np.random.uniform(0.9, 1.1, 8)), y)

    train(t, Criterion(Mlp()), loss_of=loss_of)


@habit("draw: nn.Dropout in evaluation")
def _(t: Trial) -> None:
    net = Criterion(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)))
    net.eval()
    train(t, net)


@habit("draw: steps of diffusion and noise passed in")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, noise: Tensor, when: Tensor) -> Tensor:
        level = torch.cos(when.double() / 10)[:, None]
        return F.mse_loss(self.net(level * x + (1 - level**2).sqrt() * noise), noise)

    def batch() -> tuple[Tensor, ...]:
        return t.mine(t.randn(8, 8)), t.mine(t.randn(8, 8)), t.mine(t.randint(10, 8))

    train(t, Step(forward, Mlp(8, 16, 8)), batch=batch)


@habit("draw: reparametrization with noise passed in (VAE)")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, noise: Tensor) -> Tensor:
        mean, logs = self.net(x).chunk(2, -1)
        z = mean + noise * (logs / 2).exp()
        return F.mse_loss(self.back(z), x) - 0.05 * (1 + logs - mean**2 - logs.exp()).mean()

    def batch() -> tuple[Tensor, ...]:
        return t.mine(t.randn(8, 8)), t.mine(t.randn(8, 4))

    train(t, Step(forward, Mlp(8, 16, 8), back=nn.Linear(4, 8)), batch=batch)


@habit("draw: reparametrization inside (VAE)", draws=True)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        mean, logs = self.net(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (logs / 2).exp()
        return F.mse_loss(self.back(z), x) - 0.05 * (1 + logs - mean**2 - logs.exp()).mean()

    train(t, Step(forward, Mlp(8, 16, 8), back=nn.Linear(4, 8)))
