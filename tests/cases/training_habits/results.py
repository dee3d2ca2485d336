"""What goes into a call and what comes out: containers, plain values, hidden state from call to call."""

import torch
import torch.nn.functional as F  # noqa: N812
from random_networks.network import CONTAINERS
from torch import nn

from training_habits.trial import WITH_RESULTS, Criterion, Mlp, Step, habit, loss_habit, passed, sgd, step_habit, train


def contained(name, put, take):
    """Habits of returning the loss and the scores in a container, with the loss inside or outside, and of a batch."""

    def forward(s, x, y):
        out = s.net(x)
        return put(F.mse_loss(out, y), out)

    @habit(f"results in a {name}", WITH_RESULTS)
    def _(t):
        def loss_of(step, x, y):
            loss, scores = take(step(x, y))
            t.rows(scores, "scores")
            return loss

        train(t, Step(forward), loss_of=loss_of)

    @loss_habit(f"results in a {name}, loss outside", lambda: Step(forward), WITH_RESULTS)
    def _(step, x, y):
        loss, scores = take(step(x, y))
        return loss + (scores - 1).pow(2).mean()

    @step_habit(f"batch in a {name}", loss_of=lambda step, x, y: step(put(x, y)))
    def _(s, batch):
        x, y = take(batch)
        return F.mse_loss(s.net(x), y)


for _name, _ways in CONTAINERS.items():
    contained(_name, *_ways)


@habit("rows among the results: the same tensor twice, an argument, whole numbers, what has no gradient", WITH_RESULTS)
def _(t):
    def forward(s, x, y):
        out = s.net(x)
        loss = F.mse_loss(out, y)
        return loss, loss, x, out.argmax(1), out.detach()

    def loss_of(step, x, y):
        first, second, argument, picked, out = step(x, y)
        assert not out.requires_grad
        for name, rows in (("argument", argument), ("picked", picked), ("scores", out)):
            t.rows(rows, name)
        return first + second

    train(t, Step(forward), loss_of=loss_of)


@habit("results of layers kept by hooks")
def _(t):
    def forward(s, x, y):
        loss = F.mse_loss(s.net(x), y)
        return loss + 0.1 * s.kept["a"].pow(2).mean()

    net = Step(forward, kept={})
    net.net.a.register_forward_hook(lambda _module, _args, out: net.kept.update(a=out))
    train(t, net)


@step_habit(
    "state left on the module with its graph",
    parts=lambda: {"kept": None},
    loss_of=lambda step, x, y: step(x, y) + step(x.flip(1), y),
    steps=1,
)
def _(s, x, y):
    out = s.net(x)
    s.kept = out if s.kept is None else torch.tanh(out + s.kept)
    return F.mse_loss(s.kept, y)


@habit("tensor with a gradient that is no parameter")
def _(t):
    held = torch.ones(4, requires_grad=True)
    train(t, Step(lambda s, x, y: F.mse_loss(s.net(x) * s.held[0], y), held=[held]), steps=1)
    t.whole(held.grad, "its gradient")


@habit("parameter used again outside of the call", WITH_RESULTS)
def _(t):
    net = Mlp()
    train(t, net, loss_of=lambda step, x, y: F.mse_loss(step(x) @ net.b.weight, y.repeat(1, 4)))


@habit("gradients of a head outside, by torch.autograd.grad", WITH_RESULTS)
def _(t):
    net, head = Mlp(8, 16, 8), nn.Linear(8, 4)
    x, y = t.batch()
    optimizer = sgd(head)
    loss = F.mse_loss(head(t.wrap(net)(x)), y)
    both = [head.weight, *net.parameters()]
    for parameter, gradient in zip(both, torch.autograd.grad(loss, both), strict=True):
        parameter.grad = gradient
    optimizer.step()
    t.whole(head.weight)


@loss_habit("result written into", Mlp, WITH_RESULTS)
def _(step, x, y):
    out = step(x)
    out[:, 0] = 0
    return F.mse_loss(out.mul_(2), y)


def _of_weight(s, x, y):
    return F.mse_loss(s.net(x), y), s.net.a.weight.pow(2).mean(1)


@loss_habit("result that has no rows of the batch", lambda: Step(_of_weight), WITH_RESULTS)
def _(step, x, y):
    loss, of_weight = step(x, y)
    return loss + of_weight.mean()


# -- what goes in ------------------------------------------------------------------------------------------------------


@step_habit("keyword arguments and defaults", loss_of=lambda step, x, y: step(x, target=y, weight=0.7))
def _(s, x, *, target, weight=0.5, mask=None):
    out = s.net(x)
    return F.mse_loss(out if mask is None else out * mask, target) * weight


@step_habit("tensor of one number as an argument", more=[torch.tensor(0.1), torch.tensor(0.2), torch.tensor(0.3)])
def _(s, x, y, weight):
    return F.mse_loss(s.net(x), y) * weight


@step_habit(
    "positions as an argument without rows of the batch",
    cuts=3,
    batch=lambda t: (t.randn(8, 5, 8), t.randn(8, 4)),
    more=[torch.linspace(0, 1, 40).double().view(1, 5, 8)] * 3,
)
def _(s, x, y, where):
    return F.mse_loss(s.net(x + where).mean(1), y)


@habit("smaller last batch")
def _(t):
    rows = iter([8, 8, 4, 8])
    train(t, Criterion(), batch=lambda t: (t.randn(n := next(rows), 8), t.randn(n, 4)), steps=4)


# -- state from call to call -------------------------------------------------------------------------------------------


def _recurrent(s, x, y, h):
    h = s.cell(x, h)
    return F.mse_loss(s.net(h), y), h


def _cell():
    return Step(_recurrent, cell=nn.GRUCell(8, 8))


@loss_habit("hidden state handed on with its graph: two calls, one backward pass", _cell, WITH_RESULTS)
def _(step, x, y):
    first, h = step(x, y, torch.zeros(len(x), 8))
    return first + step(x.flip(1), y, h)[0]


@habit("truncated backpropagation through time", WITH_RESULTS)
def _(t):
    state = t.mine(torch.zeros(8, 8))

    def loss_of(step, x, y):
        nonlocal state
        first, state = step(x, y, state.detach().requires_grad_())
        second, state = step(x.roll(1, 1), y, state)
        return first + second

    train(t, _cell(), loss_of=loss_of)


@step_habit("hidden state kept on the module, detached", parts=lambda: {"cell": nn.GRUCell(8, 8), "h": None})
def _(s, x, y):
    h = s.cell(x, torch.zeros(len(x), 8) if s.h is None else s.h)
    s.h = h.detach()
    return F.mse_loss(s.net(h), y)


@habit("inputs that require gradients")
def _(t):
    def loss_of(step, x, y):
        x.requires_grad_()
        loss = step(x, y)
        loss.backward()
        t.rows(x.grad, "gradient of the batch")
        x.grad = None
        x.pow(2).sum().backward()
        t.rows(x.grad, "gradient away from any step")
        return loss

    train(t, Criterion(), loss_of=loss_of, backward=passed)


@habit("gradient of the loss by the batch, torch.autograd.grad", WITH_RESULTS)
def _(t):
    step = t.wrap(Mlp())
    x, y = t.batch()
    loss = F.mse_loss(step(x.requires_grad_()), y)
    t.rows(*torch.autograd.grad(loss, x), "gradient of the batch")


@habit("latent vectors of the batch learnt beside the network")
def _(t):
    z, y = t.mine(t.randn(8, 8)).requires_grad_(), t.mine(t.randn(8, 4))

    def optimizer(net):
        return torch.optim.SGD([{"params": [z], "lr": 1.0}, {"params": list(net.parameters())}], lr=0.05)

    train(t, Criterion(), optimizer=optimizer, loss_of=lambda step, *_: step(z, y))
    t.rows(z, "latent vectors")
