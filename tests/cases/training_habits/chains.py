"""Several networks in one script: chains, adversaries, averages, teachers."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import get_rank
from training_habits.trial import WITH_RESULTS, Criterion, Mlp, Step, habit, loss_habit, sgd, step_habit, train


def each(*nets):
    """Return one optimizer for each network."""
    return [sgd(net) for net in nets]


@habit("work outside between two networks", WITH_RESULTS)
def _(t):
    def loss_of(f, g, x, y):
        h = torch.tanh(f(x)) * 2 + x
        return g(h, y) + 0.1 * h.pow(2).mean()

    train(t, Mlp(8, 16, 8), Criterion(), loss_of=loss_of)


@habit("three networks in a chain, the middle one not wrapped and frozen", WITH_RESULTS)
def _(t):
    middle = Mlp(8, 8, 8).requires_grad_(requires_grad=False)
    train(t, Mlp(8, 16, 8), Criterion(), loss_of=lambda f, g, x, y: g(middle(f(x)), y))


@habit("two towers and a head", WITH_RESULTS)
def _(t):
    head = Step(lambda s, a, b, y: F.mse_loss(s.net(a * b), y))
    towers = Mlp(8, 8, 8), Mlp(8, 8, 8)
    train(t, *towers, head, loss_of=lambda f, g, h, x, y: h(f(x), g(x.flip(1)), y), optimizer=each)


@habit("adversarial pair (GAN)", WITH_RESULTS)
def _(t):
    maker, judge = Mlp(4, 16, 8), Step(lambda s, x: s.net(x).mean(1), Mlp(8, 16, 4))
    g, d = t.wrap(maker), t.wrap(judge)
    of_maker, of_judge = each(maker, judge)
    for _ in range(3):
        real, _ = t.batch()
        fake = g(t.mine(t.randn(8, 4)))
        of_both = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        of_judge.zero_grad()
        of_both.backward()
        t.gradients(d)
        of_judge.step()
        of_fake = F.softplus(-d(fake)).mean()
        of_maker.zero_grad()
        of_fake.backward()
        t.gradients(g)
        of_maker.step()
        t.loss(of_both, "judge")
        t.loss(of_fake, "maker")
    t.state(g)
    t.state(d)


@loss_habit("gradient penalty outside (WGAN-GP)", Mlp, WITH_RESULTS)
def _(step, x, y):
    out = step(x.requires_grad_())
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + 0.1 * ((gradient.norm(dim=1) - 1) ** 2).mean()


@loss_habit("backward with create_graph, then a penalty on the gradients")
def _(step, x, y):
    loss = step(x, y)
    gradients = torch.autograd.grad(loss, list(step.parameters()), create_graph=True)
    return loss + 0.1 * sum(g.pow(2).sum() for g in gradients)


@habit("teacher that is wrapped, under no_grad", WITH_RESULTS)
def _(t):
    teacher = t.wrap(Mlp())

    def loss_of(step, x, _):
        with torch.no_grad():
            target = teacher(x)
        assert not target.requires_grad
        return F.mse_loss(step(x), target)

    train(t, Mlp(), loss_of=loss_of)


@step_habit(
    "teacher inside the network, updated in forward (MoCo)",
    parts=lambda: {"teacher": Mlp().requires_grad_(requires_grad=False)},
)
def _(s, x, _):
    with torch.no_grad():
        for mine, theirs in zip(s.teacher.parameters(), s.net.parameters(), strict=True):
            mine.mul_(0.9).add_(theirs, alpha=0.1)
        target = s.teacher(x)
    return F.mse_loss(s.net(x), target)


@habit("trainable embedding outside of the step", WITH_RESULTS)
def _(t):
    words = nn.Embedding(16, 8)
    train(
        t,
        Criterion(),
        batch=lambda t: (t.randint(16, 8), t.randn(8, 4)),
        loss_of=lambda step, ids, y: step(words(ids), y),
        optimizer=lambda net: each(words, net),
    )
    t.whole(words.weight, "embedding")


@habit("trainable head outside of the step", WITH_RESULTS)
def _(t):
    head = nn.Linear(8, 4)
    train(
        t, Mlp(8, 16, 8), loss_of=lambda step, x, y: F.mse_loss(head(step(x)), y), optimizer=lambda net: each(net, head)
    )
    t.whole(head.weight, "head")


def head_on_kept_results(t, results_of):
    head = nn.Linear(8, 4)
    train(
        t,
        Mlp(8, 16, 8),
        loss_of=lambda step, x, y: F.mse_loss(head(results_of(step, x)), y),
        optimizer=lambda _: sgd(head),
    )
    t.whole(head.weight, "head")


@habit("trainable head on detached results", WITH_RESULTS)
def _(t):
    head_on_kept_results(t, lambda step, x: step(x).detach())


@habit("trainable head on results under no_grad (linear probe)", WITH_RESULTS)
def _(t):
    head_on_kept_results(t, torch.no_grad()(lambda step, x: torch.tanh(step(x)).double()))


@habit("probe that one rank trains alone", WITH_RESULTS)
def _(t):
    probe = Mlp()
    optimizer = sgd(probe)

    def after(_net, _step):
        if get_rank() == 0:
            optimizer.zero_grad()
            probe(torch.ones(2, 8)).pow(2).mean().backward()
            optimizer.step()

    train(t, Criterion(), after=after)


@habit("two wrapped networks that share a layer", WITH_RESULTS)
def _(t):
    trunk = nn.Linear(8, 8)
    nets = [Criterion(nn.Sequential(trunk, part, nn.Linear(8, 4))) for part in (nn.Tanh(), nn.ReLU())]
    turns = iter([0, 1, 0])
    train(t, *nets, loss_of=lambda f, g, x, y: (f, g)[next(turns)](x, y))


@step_habit("inner step inside by functional_call (MAML)")
def _(s, x, y):
    weights = dict(s.net.named_parameters())
    loss = F.mse_loss(torch.func.functional_call(s.net, weights, (x,)), y)
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return F.mse_loss(torch.func.functional_call(s.net, moved, (x.flip(1),)), y)
