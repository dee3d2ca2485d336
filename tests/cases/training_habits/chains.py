"""Several networks in one script: chains, adversaries, averages, teachers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from msrun.runtime import get_rank
from training_habits.losses import WITH_RESULTS, Step
from training_habits.trial import Criterion, Mlp, Trial, habit, sgd, train


class Both:
    """The optimizers of several networks."""

    def __init__(self, *nets: nn.Module) -> None:
        self.all = [sgd(net) for net in nets]

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()


def chain(t: Trial, *nets: nn.Module, loss_of: Any, outer: bool = False) -> None:
    """Train networks that are wrapped one by one, on one loss.

    Args:
        outer: there is one optimizer for all of them.
    """
    steps = [t.wrap(net) for net in nets]
    optimizer: Any = Both(*nets)
    if outer:
        optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.05)
    for number in range(3):
        loss = loss_of(*steps, *t.batch())
        optimizer.zero_grad()
        loss.backward()
        if number == 0:
            for step in steps:
                t.gradients(step)
        optimizer.step()
        t.loss(loss)
    for step in steps:
        t.state(step)


@habit("encoder and decoder, loss inside the decoder", WITH_RESULTS)
def _(t: Trial) -> None:
    chain(t, Mlp(8, 16, 8), Criterion(Mlp()), loss_of=lambda f, g, x, y: g(f(x), y))


@habit("encoder and decoder, loss outside", WITH_RESULTS)
def _(t: Trial) -> None:
    chain(t, Mlp(8, 16, 8), Mlp(), loss_of=lambda f, g, x, y: F.mse_loss(g(f(x)), y))


@habit("encoder and decoder with one optimizer", WITH_RESULTS)
def _(t: Trial) -> None:
    chain(t, Mlp(8, 16, 8), Criterion(Mlp()), loss_of=lambda f, g, x, y: g(f(x), y), outer=True)


@habit("work outside between two networks", WITH_RESULTS)
def _(t: Trial) -> None:
    def loss_of(f: Any, g: Any, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(f(x)) * 2 + x
        return g(h, y) + 0.1 * h.pow(2).mean()

    chain(t, Mlp(8, 16, 8), Criterion(Mlp()), loss_of=loss_of)


@habit("three networks in a chain", WITH_RESULTS)
def _(t: Trial) -> None:
    chain(
        t, Mlp(8, 16, 8), Mlp(8, 8, 8), Criterion(Mlp()), loss_of=lambda f, g, h, x, y: h(g(f(x)), y),
    )  # fmt: skip


@habit("three networks in a chain, the middle one not wrapped and frozen", WITH_RESULTS)
def _(t: Trial) -> None:
    middle = Mlp(8, 8, 8).requires_grad_(requires_grad=False)
    chain(t, Mlp(8, 16, 8), Criterion(Mlp()), loss_of=lambda f, g, x, y: g(middle(f(x)), y))


@habit("one network called twice in a chain", WITH_RESULTS)
def _(t: Trial) -> None:
    chain(t, Mlp(8, 16, 8), Criterion(Mlp()), loss_of=lambda f, g, x, y: g(f(f(x)), y))


@habit("two towers and a head", WITH_RESULTS)
def _(t: Trial) -> None:
    head = Step(lambda self, a, b, y: F.mse_loss(self.net(a * b), y))
    chain(t, Mlp(8, 8, 8), Mlp(8, 8, 8), head, loss_of=lambda f, g, h, x, y: h(f(x), g(x.flip(1)), y))


@habit("two losses of two networks added")
def _(t: Trial) -> None:
    chain(t, Criterion(Mlp()), Criterion(Mlp()), loss_of=lambda f, g, x, y: f(x, y) + 2 * g(x.flip(1), y))


@habit("gradients accumulated over a chain", WITH_RESULTS)
def _(t: Trial) -> None:
    f, g = Mlp(8, 16, 8), Criterion(Mlp())
    first, second, optimizer = t.wrap(f), t.wrap(g), Both(f, g)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            x, y = t.batch()
            loss = second(first(x), y) / 2
            loss.backward()
            t.loss(loss)
        optimizer.step()
    t.state(first)
    t.state(second)


@habit("adversarial pair (GAN)", WITH_RESULTS)
def _(t: Trial) -> None:
    maker = Mlp(4, 16, 8)
    judge = Step(lambda self, x: self.net(x).mean(1), Mlp(8, 16, 4))
    g, d = t.wrap(maker), t.wrap(judge)
    of_maker, of_judge = sgd(maker), sgd(judge)
    for number in range(3):
        real, _ = t.batch()
        noise = t.mine(t.randn(8, 4))
        fake = g(noise)
        loss = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        of_judge.zero_grad()
        loss.backward()
        if number == 0:
            t.gradients(d)
        of_judge.step()
        t.loss(loss, "judge")
        loss = F.softplus(-d(fake)).mean()
        of_maker.zero_grad()
        loss.backward()
        if number == 0:
            t.gradients(g)
        of_maker.step()
        t.loss(loss, "maker")
    t.state(g)
    t.state(d)


@habit("adversarial pair whose losses are inside", WITH_RESULTS)
def _(t: Trial) -> None:
    maker = Mlp(4, 16, 8)
    judge = Step(lambda self, x, sign: F.softplus(-sign * self.net(x).mean(1)).mean(), Mlp(8, 16, 4))
    g, d = t.wrap(maker), t.wrap(judge)
    of_maker, of_judge = sgd(maker), sgd(judge)
    for _ in range(3):
        real, _ = t.batch()
        noise = t.mine(t.randn(8, 4))
        of_judge.zero_grad()
        loss = d(real, 1.0) + d(g(noise).detach(), -1.0)
        loss.backward()
        of_judge.step()
        t.loss(loss, "judge")
        of_maker.zero_grad()
        judge.requires_grad_(requires_grad=False)
        loss = d(g(noise), 1.0)
        loss.backward()
        judge.requires_grad_(requires_grad=True)
        t.gradients(g)
        of_maker.step()
        t.loss(loss, "maker")
    t.state(g)
    t.state(d)


@habit("gradient penalty outside (WGAN-GP)", WITH_RESULTS)
def _(t: Trial) -> None:
    def loss_of(d: Any, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        out = d(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * ((gradient.norm(dim=1) - 1) ** 2).mean()

    chain(t, Mlp(), loss_of=loss_of)


@habit("gradient penalty inside")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.net(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * gradient.pow(2).sum(1).mean()

    chain(t, Step(forward), loss_of=lambda f, x, y: f(x, y))


@habit("backward with create_graph, then a penalty on the gradients")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step, optimizer = t.wrap(net), sgd(net)
    for _ in range(2):
        x, y = t.batch()
        optimizer.zero_grad()
        loss = step(x, y)
        gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        total = loss + 0.1 * sum(g.pow(2).sum() for g in gradients)
        total.backward()
        optimizer.step()
        t.loss(total)
    t.state(step)


@habit("teacher that is wrapped, under no_grad", WITH_RESULTS)
def _(t: Trial) -> None:
    teacher = t.wrap(Mlp())

    def loss_of(f: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        assert not target.requires_grad
        return F.mse_loss(f(x), target)

    chain(t, Mlp(), loss_of=loss_of)


@habit("teacher that follows the pupil (mean teacher, BYOL)", WITH_RESULTS)
def _(t: Trial) -> None:
    pupil = Mlp(8, 16, 8)
    teacher = copy.deepcopy(pupil).requires_grad_(requires_grad=False)
    f, g, optimizer = t.wrap(pupil), t.wrap(teacher), sgd(pupil)
    for _ in range(3):
        x, _ = t.batch()
        with torch.no_grad():
            target = g(x.flip(1))
        loss = 2 - 2 * F.cosine_similarity(f(x), target).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), pupil.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        t.loss(loss)
    t.state(f)
    t.state(g)


@habit("teacher inside the network, updated in forward (MoCo)")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            target = self.teacher(x)
        return F.mse_loss(self.net(x), target)

    teacher = Mlp().requires_grad_(requires_grad=False)
    chain(t, Step(forward, teacher=teacher), loss_of=lambda f, x, y: f(x, y))


@habit("actor and critic with one trunk", WITH_RESULTS)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor) -> Any:
        h = torch.tanh(self.net.a(x))
        return self.net.b(h), self.value(h).squeeze(1)

    def loss_of(f: Any, x: Tensor, y: Tensor) -> Tensor:
        scores, value = f(x)
        gain = (y.mean(1) - value).detach()
        logp = scores.log_softmax(1)
        picked = logp.gather(1, y.argmax(1, keepdim=True)).squeeze(1)
        entropy = -(logp.exp() * logp).sum(1).mean()
        return -(picked * gain).mean() + 0.5 * F.mse_loss(value, y.mean(1)) - 0.01 * entropy

    chain(t, Step(forward, value=nn.Linear(16, 1)), loss_of=loss_of)


@habit("old policy kept as a copy (PPO)", WITH_RESULTS)
def _(t: Trial) -> None:
    def loss_of(f: Any, x: Tensor, y: Tensor) -> Tensor:
        pick = y.argmax(1, keepdim=True)
        logp = f(x).log_softmax(1).gather(1, pick)
        ratio = (logp - logp.detach() + 0.1 * y[:, :1]).exp()
        gain = y.mean(1, keepdim=True)
        return -torch.min(ratio * gain, ratio.clamp(0.9, 1.1) * gain).mean()

    chain(t, Mlp(), loss_of=loss_of)


@habit("trainable embedding outside of the step", WITH_RESULTS)
def _(t: Trial) -> None:
    words, net = nn.Embedding(16, 8), Criterion(Mlp())
    step, optimizer = t.wrap(net), Both(words, net)
    for _ in range(3):
        ids = t.mine(t.randint(16, 8))
        loss = step(words(ids), t.mine(t.randn(8, 4)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.whole(words.weight, "embedding")
    t.state(step)


@habit("trainable head outside of the step", WITH_RESULTS)
def _(t: Trial) -> None:
    net, head = Mlp(8, 16, 8), nn.Linear(8, 4)
    step, optimizer = t.wrap(net), Both(net, head)
    for _ in range(3):
        x, y = t.batch()
        loss = F.mse_loss(head(step(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.whole(head.weight, "head")
    t.state(step)


def head_on_kept_results(t: Trial, results_of: Any) -> None:
    net, head = Mlp(8, 16, 8), nn.Linear(8, 4)
    step, optimizer = t.wrap(net), sgd(head)
    for _ in range(3):
        x, y = t.batch()
        loss = F.mse_loss(head(results_of(step, x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.whole(head.weight, "head")
    t.state(step)


@habit("trainable head on detached results", WITH_RESULTS)
def _(t: Trial) -> None:
    head_on_kept_results(t, lambda step, x: step(x).detach())


@habit("trainable head on results under no_grad (linear probe)", WITH_RESULTS)
def _(t: Trial) -> None:
    def results_of(step: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.tanh(step(x)).double()

    head_on_kept_results(t, results_of)


@habit("probe that one rank trains alone", WITH_RESULTS)
def _(t: Trial) -> None:
    probe = Mlp()
    optimizer = sgd(probe)

    def after(_net: nn.Module, _step: int) -> None:
        if get_rank() == 0:
            optimizer.zero_grad()
            probe(torch.ones(2, 8)).pow(2).mean().backward()
            optimizer.step()

    train(t, Criterion(Mlp()), after=after)


@habit("trainable head on detached results, wrapped", WITH_RESULTS)
def _(t: Trial) -> None:
    chain(t, Mlp(8, 16, 8), Criterion(nn.Linear(8, 4)), loss_of=lambda f, g, x, y: g(f(x).detach(), y))


@habit("two wrapped networks that share a layer", WITH_RESULTS)
def _(t: Trial) -> None:
    trunk = nn.Linear(8, 8)
    first = nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, 4))
    second = nn.Sequential(trunk, nn.ReLU(), nn.Linear(8, 4))
    steps = [t.wrap(Criterion(first)), t.wrap(Criterion(second))]
    optimizer = torch.optim.SGD(list(dict.fromkeys([*first.parameters(), *second.parameters()])), lr=0.05)
    for number in range(3):
        loss = steps[number % 2](*t.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)
    t.state(steps[0])
    t.state(steps[1])


@habit("networks trained in turns")
def _(t: Trial) -> None:
    nets = [Criterion(Mlp()), Criterion(Mlp())]
    steps, optimizer = [t.wrap(net) for net in nets], Both(*nets)
    for number in range(4):
        optimizer.zero_grad()
        loss = steps[number % 2](*t.batch())
        loss.backward()
        optimizer.step()
        t.loss(loss)
    for step in steps:
        t.state(step)


@habit("inner step on a copy, outer step by its gradient (Reptile)")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step = t.wrap(net)
    t.loss(step(*t.batch()), "before")
    for _ in range(2):
        before = [p.detach().clone() for p in net.parameters()]
        inner = sgd(net)
        for _ in range(2):
            loss = step(*t.batch())
            inner.zero_grad()
            loss.backward()
            inner.step()
            t.loss(loss)
        with torch.no_grad():
            for p, old in zip(net.parameters(), before, strict=True):
                p.copy_(old + 0.5 * (p - old))
    t.state(step)


@habit("inner step inside by functional_call (MAML)")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(self.net, weights, (x,)), y)
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return F.mse_loss(torch.func.functional_call(self.net, moved, (x.flip(1),)), y)

    chain(t, Step(forward), loss_of=lambda f, x, y: f(x, y))
