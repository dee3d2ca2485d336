"""Weights that are read as they are, results that the loss does not read, operators with several results."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import GradAccumulation, recompute, shard
from training_habits.trial import (
    CAPTURED,
    MODES,
    WITH_RESULTS,
    Criterion,
    Step,
    habit,
    loss_habit,
    scores,
    step_habit,
    train,
)

SCHEDULES = (*MODES, "pipeline zero_bubble", "pipeline zbv")


def square():
    return nn.Linear(8, 8)


def last():
    return nn.Linear(8, 4)


def wide():
    return nn.Parameter(torch.randn(16, 8) / 3)


# -- memory of gathered weights ----------------------------------------------------------------------------------------


def _halves(s, x):
    one, other = s.w.chunk(2)
    return s.last(F.linear(F.linear(x, one).tanh(), other).tanh())


def _late_view(s, x):
    flipped = s.first.weight.t()
    for layer in s.layers:
        x = layer(x).tanh()
    return s.last(s.first(x) @ flipped.reshape(2, 4, 8).flatten(0, 1))


def _averaged(s, x):
    found = s.net(x) + 0.1 * s.seen.sum()
    s.seen.copy_(s.net.a.weight.detach().t())
    s.bias.copy_(s.net.a.bias.detach())
    return found


scores("halves of a weight", _halves, w=wide, last=last)
scores("weight read as it is, too", lambda s, x: s.last(s.a(x).tanh() @ s.a.weight + s.a.bias), a=square, last=last)
scores(
    "view of an early weight, read late",
    _late_view,
    modes=SCHEDULES,
    first=square,
    layers=lambda: nn.ModuleList(square() for _ in range(4)),
    last=last,
)
scores("buffers from weights", _averaged, seen=lambda: torch.zeros(8, 16), bias=lambda: torch.zeros(16))
for _kind, _wrap in (("in micro batches", lambda net: GradAccumulation(net, 2)), ("recomputed", recompute)):

    @habit(f"halves of a weight, {_kind}", CAPTURED)
    def _(t, wrap=_wrap):
        train(t, wrap(Step(lambda s, x, y: F.mse_loss(_halves(s, x), y), w=wide(), last=last())))


@habit("view of a weight that leaves a recomputed module", CAPTURED)
def _(t):
    block = Step(lambda s, x: (s.net(x).tanh(), s.net.weight.t()), square())
    recompute(block, parallel_optimizer_comm_recompute=True)

    def forward(s, x, y):
        hidden, turned = s.block(x)
        return F.mse_loss(s.net(hidden @ turned), y)

    train(t, Step(forward, block=block))


for _cut in (((2, 1), (1, 1)), ((1, 2), (1, 1))):

    @habit(f"tied head of a table cut by {_cut[0]}", CAPTURED[:3])
    def _(t, cut=_cut):
        table = nn.Embedding(12, 8)
        shard(table, cut)
        net = Step(lambda s, x: F.linear(s.mix(s.table(x)).tanh(), s.table.weight), table=table, mix=square())
        train(t, Criterion(net), batch=lambda t: (t.randint(12, 8, 3), t.randn(8, 3, 12)))


# -- one weight twice --------------------------------------------------------------------------------------------------


@habit("one weight in two modules", SCHEDULES)
def _(t):
    net = Step(lambda s, x: s.last(s.b(s.a(x).tanh()) @ s.b.weight), a=square(), b=nn.Linear(8, 8, bias=False))
    net.b.weight, net.last = net.a.weight, last()
    train(t, Criterion(net))


@habit("one bias in a layer and a norm", SCHEDULES)
def _(t):
    net = Step(lambda s, x: s.last(s.norm(s.a(x))), a=square(), norm=nn.LayerNorm(8), last=last())
    net.norm.bias = net.a.bias
    train(t, Criterion(net))


# -- parameters that the loss does not read ----------------------------------------------------------------------------


def _tied_beside(s, x, y):
    hidden = s.a(x).tanh()
    return F.mse_loss(s.last(hidden), y), F.linear(s.dead(hidden), s.a.weight)


def _without_gradient(s, x, y):
    with torch.no_grad():
        shift = s.aux(x).mean(-1, keepdim=True)
    return F.mse_loss(s.last(x) + shift, y), shift


UNREAD = {
    "a layer beside the loss": lambda s, x, y: (F.mse_loss(s.last(x), y), s.aux(x)),
    "a layer read without a gradient": _without_gradient,
    "a layer whose result is detached": lambda s, x, y: (F.mse_loss(s.last(s.a(x + s.aux(x).detach())), y),),
    "a layer beside the loss, and a weight that both read": _tied_beside,
}


def _unread(forward):
    return Step(forward, last(), aux=square(), a=square(), dead=square(), last=last())


for _name, _forward in UNREAD.items():
    for _suffix, _wrapped, _modes in (
        ("", lambda net: net, SCHEDULES),
        (", in micro batches", lambda net: GradAccumulation(net, 2), CAPTURED),
    ):
        loss_habit(f"{_name}{_suffix}", lambda f=_forward, w=_wrapped: w(_unread(f)), _modes)(
            lambda step, x, y: step(x, y)[0]
        )


def _weights_too(s, x, y):
    loss = F.mse_loss(s.last(s.a(x).tanh()), y) + s.a.weight[0, 0]
    return loss, s.a.weight.t(), s.a.weight, s.a.bias.detach(), s.dead.bias


loss_habit("weights among the results", lambda: _unread(_weights_too), WITH_RESULTS)(lambda step, x, y: step(x, y)[0])

# -- operators with several results ------------------------------------------------------------------------------------


@step_habit(
    "parts of a result read far apart",
    SCHEDULES,
    cuts=3,
    batch=lambda t: (t.randn(8, 3, 8), t.randn(8, 3, 4)),
    parts=lambda: {"a": nn.Linear(8, 16), "last": last(), **{name: square() for name in "bcd"}},
)
def _(s, x, y):
    early, late = s.a(x).split(8, dim=-1)
    one, two = s.b(early).tanh().unbind(1)[:2]
    mean = s.c(early) + one[:, None] + two[:, None]
    return F.mse_loss(s.last(s.d(mean).tanh() + late), y)


@step_habit(
    "projections of attention in one",
    SCHEDULES,
    cuts=3,
    batch=lambda t: (t.randn(8, 3, 8), t.randn(8, 3, 4)),
    parts=lambda: {"qkv": nn.Linear(8, 24), "out": square()},
)
def _(s, x, y):
    for _ in range(2):
        x = x + s.out(F.scaled_dot_product_attention(*s.qkv(x).chunk(3, dim=-1)))
    return F.mse_loss(s.net(x), y)


@step_habit(
    "LSTM between layers",
    SCHEDULES,
    batch=lambda t: (t.randn(8, 3, 8), t.randn(8, 3, 4)),
    parts=lambda: {"first": square(), "inner": nn.LSTM(8, 8, batch_first=True)},
    cuts=3,
)
def _(s, x, y):
    return F.mse_loss(s.net(s.inner(s.first(x))[0]), y)
