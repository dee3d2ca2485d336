"""Writes in place: into views of what an operator or a module has made, into buffers and into the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from training_habits.losses import Step
from training_habits.trial import Criterion, Mlp, Trial, habit, train


class Edited(nn.Module):
    """What the first layer makes is edited before the second reads it."""

    def __init__(self, edit: Callable[[Tensor], Any], layer: nn.Module | None = None, *, goes_on: bool = False) -> None:
        super().__init__()
        self.a = layer or nn.Linear(8, 16)
        self.b = nn.Linear(16, 4)
        self._edit, self._goes_on = edit, goes_on

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        edited = self._edit(h)
        return F.mse_loss(self.b(torch.tanh(edited if self._goes_on else h)), y)


def edited(name: str, edit: Callable[[Tensor], Any], *, goes_on: bool = False) -> None:
    """A habit of writing into what a linear layer has made.

    Args:
        goes_on: the network goes on with what `edit` returns.
    """

    @habit(f"write: {name}")
    def _(t: Trial) -> None:
        train(t, Edited(edit, goes_on=goes_on))


def _set(*place: Any, value: Any = 0.5) -> Callable[[Tensor], None]:
    def edit(h: Tensor) -> None:
        h[place] = value(h) if callable(value) else value

    return edit


def _all(*edits: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    def edit(h: Tensor) -> None:
        for one in edits:
            one(h)

    return edit


edited("a column set", _set(slice(None), 0))
edited("columns set from others", _set(slice(None), slice(0, 4), value=lambda h: h[:, 4:8] * 2))
edited("last column by an ellipsis", _set(..., -1, value=lambda h: h[..., 0].sigmoid()))
edited("every second column scaled", lambda h: h[:, ::2].mul_(3))
edited("column added to, then the whole", _all(lambda h: h[:, 0].add_(3), lambda h: h.add_(1)))
edited("the whole, then a column", _all(lambda h: h.mul_(2), lambda h: h[:, 1].zero_()))
edited("view of blocks", lambda h: h.view(-1, 4, 4)[:, 1].fill_(1))
edited("transposed view", lambda h: h.t()[2].mul_(-1))
edited("narrow", lambda h: h.narrow(1, 3, 5).clamp_(-0.1, 0.1))
edited("unfold", lambda h: h.unfold(1, 4, 4)[:, 1].sigmoid_())
edited("as_strided", lambda h: h.as_strided((len(h), 4), (16, 2)).neg_())
edited("unsqueeze and squeeze", lambda h: h.unsqueeze(0).squeeze(0)[:, 2].copy_(h[:, 3].detach()))
edited("diagonal", lambda h: h[:, :8].diagonal().zero_())
edited("view of a view of a view", lambda h: h.view(-1, 2, 8)[:, 0][:, 2:6][:, ::2].add_(5))
edited("index_fill_ and index_add_", _all(
    lambda h: h.index_fill_(1, torch.tensor([0, 5]), 0.3),
    lambda h: h.index_add_(1, torch.tensor([1, 2]), torch.ones(len(h), 2)),
))  # fmt: skip
edited("columns by a list", _set(slice(None), [0, 3, 7]))
edited("scatter_", lambda h: h.scatter_(1, torch.zeros(len(h), 1, dtype=torch.long), 2.0))
edited("boolean mask set to a number", lambda h: h.__setitem__(h > 0.5, 0.1))
edited("masked_fill_ on a view", lambda h: h[:, 4:].masked_fill_(h[:, :12] > 0, 0.0))
edited("copy_ into a slice", lambda h: h[:, :8].copy_(h[:, 8:].clone()))
edited("augmented assignment of slices", lambda h: h[:, 0:2].__iadd__(h[:, 2:4]))
edited("relu_ and dropout in place", _all(torch.relu_, lambda h: F.dropout(h, 0.0, inplace=True)))
edited("clone, then a write into it", lambda h: (c := h.clone(), c[:, 0].zero_(), h + c)[-1], goes_on=True)
edited("write into a reshape", lambda h: h.reshape(len(h), 4, 4)[:, :, 0].mul_(0.1))
edited("write into flatten", lambda h: h.flatten()[3::4].fill_(0.2))
edited("write into permute", lambda h: h.view(-1, 4, 4).permute(2, 0, 1)[1].add_(1))
edited("write into expand's source", lambda h: (e := h[:, :1].expand(-1, 16), h.mul_(2), h + e)[-1], goes_on=True)
edited("write into cat", lambda h: (c := torch.cat([h[:, 8:], h[:, :8]], 1), c[:, 0].zero_())[0], goes_on=True)
edited("write into stack and where", lambda h: (
    c := torch.where(h > 0, h, -h), s := torch.stack([c, h], 1), s[:, 1, ::2].zero_(), s.sum(1))[-1],
    goes_on=True)  # fmt: skip
edited("write into a product", lambda h: (c := h * 2 + 1, c[:, :3].tanh_(), c)[-1], goes_on=True)
edited("write into softmax", lambda h: (c := h.softmax(-1) + 0, c[:, 1].mul_(2), c)[-1], goes_on=True)
edited(
    "write with out=",
    lambda h: (c := torch.empty_like(h.detach()), torch.add(h.detach(), 1, out=c), h * c)[-1],
    goes_on=True,
)
edited("write in a loop over columns", lambda h: [h[:, k].mul_(0.5 * k) for k in range(4)])
edited("lerp_, addcmul_, baddbmm-like", _all(
    lambda h: h.lerp_(torch.ones_like(h), 0.25), lambda h: h.addcmul_(h.detach(), h.detach(), value=0.1)
))  # fmt: skip
edited("write into the gradient-free part", lambda h: (d := h.detach(), d[:, 0].zero_(), h * 1)[-1], goes_on=True)


@habit("write: under no_grad")
def _(t: Trial) -> None:
    def edit(h: Tensor) -> None:
        with torch.no_grad():
            h[:, 3:6] *= 0.5

    train(t, Edited(edit))


@habit("write: the head of a detector")
def _(t: Trial) -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        out[..., 0] = torch.sigmoid(out[..., 0])
        out[..., 1:3] = out[..., 1:3] * 2
        return F.mse_loss(out, y)

    train(t, Criterion(Mlp(), loss))


@habit("write: into what a Sequential has made")
def _(t: Trial) -> None:
    train(t, Edited(lambda h: h[:, :2].zero_(), nn.Sequential(nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 16))))  # fmt: skip  # noqa: E501


@habit("write: into the rows that a block has made", cuts=3)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for block in self.blocks:
            h = block(h)
            h += 1
            h.flatten(1)[:, ::2].mul_(0.5)
        return F.mse_loss(self.net(h).mean(1), y)

    def batch() -> tuple[Tensor, Tensor]:
        return t.mine(t.randn(8, 3, 8)), t.mine(t.randn(8, 4))

    class Written(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            h.flatten(1)[:, ::3].mul_(2)
            return h

    train(t, Step(forward, blocks=nn.ModuleList([nn.Linear(8, 8), Written(8, 8)])), batch=batch)


@habit("write: into a layer norm's output")
def _(t: Trial) -> None:
    layer = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    train(t, Edited(lambda h: h[:, 0].fill_(1), layer))


@habit("write: into a batch norm's output")
def _(t: Trial) -> None:
    layer = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16).eval())
    train(t, Edited(lambda h: h[:, 1::3].mul_(2), layer))


@habit("write: into an embedding's output", cuts=3)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        h[:, 0] = 0
        h[:, 1:3, ::2] += 1
        return F.mse_loss(self.net(h).mean(1), y)

    def batch() -> tuple[Tensor, Tensor]:
        return t.mine(t.randint(12, 8, 5)), t.mine(t.randn(8, 4))

    train(t, Step(forward, words=nn.Embedding(12, 8)), batch=batch)


@habit("write: into a convolution's output")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = self.conv(x)
        h[:, 0] = 0
        h[:, :, 1:, 1:] -= 0.5
        return F.mse_loss(self.net(h.mean(3).flatten(1)), y)

    def batch() -> tuple[Tensor, Tensor]:
        return t.mine(t.randn(8, 1, 4, 4)), t.mine(t.randn(8, 4))

    train(t, Step(forward, conv=nn.Conv2d(1, 2, 3, padding=1)), batch=batch)


@habit("write: into attention's scores", cuts=3)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 8**0.5
        scores.masked_fill_(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        scores[:, :, 0] += 0.5
        return F.mse_loss(self.net(scores.softmax(-1) @ v).mean(1), y)

    def batch() -> tuple[Tensor, Tensor]:
        return t.mine(t.randn(8, 5, 8)), t.mine(t.randn(8, 4))

    train(t, Step(forward, qkv=nn.Linear(8, 24)), batch=batch)


@habit("write: key-value cache filled position by position", cuts=2)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        cache = x.new_zeros(len(x), 4, 16)
        for place in range(4):
            cache[:, place] = self.net.a(x.roll(place, 1))
        return F.mse_loss(self.net.b(torch.tanh(cache.mean(1))), y)

    train(t, Step(forward))


@habit("write: two results of one layer, one edited")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = self.net.a(x)
        first, second = h[:, :8], h[:, 8:]
        first += second
        second *= 2
        return F.mse_loss(self.net.b(torch.tanh(h)), y)

    train(t, Step(forward))


@habit("write: a function with @ edits its argument")
def _(t: Trial) -> None:
    def standardize(v: Tensor) -> None:
        v -= v.mean(1, keepdim=True)
        v *= 0.5

    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = self.net.a(x)
        standardize(h[:, :8])
        return F.mse_loss(self.net.b(torch.tanh(h)), y)

    train(t, Step(forward))


@habit("write: a hook edits the module's output")
def _(t: Trial) -> None:
    net = Criterion(Mlp())

    def hook(_module: nn.Module, _args: Any, out: Tensor) -> None:
        out[:, :2] = 0.25

    net.net.a.register_forward_hook(hook)
    train(t, net)


@habit("write: into the batch in forward")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        x[:, 0] = 0
        return F.mse_loss(self.net(x), y)

    train(t, Step(forward))


@habit("write: into a copy of the batch in forward")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 0
        x[:, 1:].clamp_(min=0)
        return F.mse_loss(self.net(x), y)

    train(t, Step(forward))


@habit("write: a counter buffer")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(self.net(x), y) / self.calls

    net = Step(forward)
    net.register_buffer("calls", torch.zeros(()))
    train(t, net)


@habit("write: row of a buffer, by a counter")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        self.seen[1] = self.seen[1] * 0.9 + x.detach().mean(0)
        self.seen[0, :2].add_(1)
        return F.mse_loss(self.net(x - 0.1 * self.seen[1]), y)

    net = Step(forward)
    net.register_buffer("seen", torch.zeros(2, 8))
    train(t, net)


@habit("write: a parameter in forward (weights kept on the sphere)")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.net.b.weight.mul_(0.9)
        return F.mse_loss(self.net(x), y)

    train(t, Step(forward))


@habit("write: parameter.data in forward")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        self.net.b.weight.data.clamp_(-0.1, 0.1)
        return F.mse_loss(self.net(x), y)

    train(t, Step(forward))
