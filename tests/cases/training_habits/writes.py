"""Writes in place: into views of what an operator or a module has made, into buffers and into the batch."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from training_habits.losses import criterion
from training_habits.trial import Step, habit, step_habit, train


def edited(name, edit, *, goes_on=False):
    """A habit of writing into what the first layer has made, before the second reads it.

    Args:
        goes_on: the network goes on with what `edit` returns.
    """

    @habit(f"write: {name}")
    def _(t):
        def forward(s, x, y):
            h = s.net.a(x)
            edited = edit(h)
            return F.mse_loss(s.net.b(torch.tanh(edited if goes_on else h)), y)

        train(t, Step(forward))


def _column(h):
    h[:, 0] = 0.5
    h[:, :4] = h[:, 4:8] * 2
    h.add_(1)


def _by_index(h):
    h.index_fill_(1, torch.tensor([0, 5]), 0.3)
    h.index_add_(1, torch.tensor([1, 2]), torch.ones(len(h), 2))
    h.scatter_(1, torch.full((len(h), 1), 7), 2.0)


def _under_no_grad(h):
    with torch.no_grad():
        h[:, 3:6] *= 0.5


edited("columns set, then the whole", _column)
edited("view of blocks", lambda h: h.view(-1, 4, 4)[:, 1].fill_(1))
edited("transposed view", lambda h: h.t()[2].mul_(-1))
edited("unfold", lambda h: h.unfold(1, 4, 4)[:, 1].sigmoid_())
edited("as_strided", lambda h: h.as_strided((len(h), 4), (16, 2)).neg_())
edited("diagonal", lambda h: h[:, :8].diagonal().zero_())
edited("view of a view of a view", lambda h: h.view(-1, 2, 8)[:, 0][:, 2:6][:, ::2].add_(5))
edited("index_fill_, index_add_ and scatter_", _by_index)
edited("masked_fill_ on a view", lambda h: h[:, 4:].masked_fill_(h[:, :12] > 0, 0.0))
edited("clone, then a write into it", lambda h: (c := h.clone(), c[:, 0].zero_(), h + c)[-1], goes_on=True)
edited("write into a reshape", lambda h: h.reshape(len(h), 4, 4)[:, :, 0].mul_(0.1))
edited("write into permute", lambda h: h.view(-1, 4, 4).permute(2, 0, 1)[1].add_(1))
edited("write into expand's source", lambda h: (e := h[:, :1].expand(-1, 16), h.mul_(2), h + e)[-1], goes_on=True)
edited("write into cat", lambda h: (c := torch.cat([h[:, 8:], h[:, :8]], 1), c[:, 0].zero_())[0], goes_on=True)
edited("write with out=", lambda h: torch.add(h.detach(), 1, out=torch.empty_like(h.detach())) * h, goes_on=True)
edited("write into the gradient-free part", lambda h: (d := h.detach(), d[:, 0].zero_(), h * 1)[-1], goes_on=True)
edited("under no_grad", _under_no_grad)


def _detected(out, y):
    out[..., 0] = torch.sigmoid(out[..., 0])
    out[..., 1:3] = out[..., 1:3] * 2
    return F.mse_loss(out, y)


criterion("write: the head of a detector", _detected)


class Written(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        h.flatten(1)[:, ::3].mul_(2)
        return h


@step_habit(
    "write: into the rows that a block has made",
    cuts=3,
    parts=lambda: {"blocks": nn.ModuleList([nn.Linear(8, 8), Written(8, 8)])},
    batch=lambda t: (t.randn(8, 3, 8), t.randn(8, 4)),
)
def _(s, x, y):
    for block in s.blocks:
        x = block(x)
        x += 1
        x.flatten(1)[:, ::2].mul_(0.5)
    return F.mse_loss(s.net(x).mean(1), y)


@step_habit("write: into the batch in forward")
def _(s, x, y):
    x[:, 0] = 0
    return F.mse_loss(s.net(x), y)


@step_habit("write: row of a buffer, by a counter", parts=lambda: {"seen": torch.zeros(2, 8)})
def _(s, x, y):
    s.seen[1] = s.seen[1] * 0.9 + x.detach().mean(0)
    s.seen[0, :2].add_(1)
    return F.mse_loss(s.net(x - 0.1 * s.seen[1]), y)


@step_habit("write: a parameter in forward (weights kept on the sphere)")
def _(s, x, y):
    with torch.no_grad():
        s.net.b.weight.mul_(0.9)
    return F.mse_loss(s.net(x), y)


@step_habit("write: parameter.data in forward")
def _(s, x, y):
    s.net.b.weight.data.clamp_(-0.1, 0.1)
    return F.mse_loss(s.net(x), y)
