"""What networks are made of: tied and frozen weights, norms, hooks, experts, transforms, mixed types."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from msrun.errors import MsrunError
from training_habits.losses import WITH_RESULTS, Step
from training_habits.trial import Criterion, Mlp, Trial, habit, train


def forward_habit(
    name: str, forward: Callable[..., Tensor], *, parts: Callable[[], dict[str, Any]] = dict, **options: Any
) -> None:
    """A habit of a forward pass that gives scores of (x); the loss is their squared distance."""

    @habit(name, **options)
    def _(t: Trial) -> None:
        train(t, Step(lambda self, x, y: F.mse_loss(forward(self, x), y), **parts()))


def sequences(t: Trial, length: int = 5) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (t.mine(t.randn(8, length, 8)), t.mine(t.randn(8, 4)))


# -- weights -----------------------------------------------------------------------------------------------------------


@habit("weights tied between embedding and head")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.words(x))), y)

    net = Step(forward, words=nn.Embedding(16, 8), head=nn.Linear(8, 16, bias=False))
    net.head.weight = net.words.weight
    del net.net
    train(t, net, batch=lambda: (t.mine(t.randint(16, 8)), t.mine(t.randint(16, 8))))


@habit("weight tied transposed (autoencoder)")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.net.a(x))
        return F.mse_loss(F.linear(h, self.net.a.weight.t()), x) + F.mse_loss(self.net.b(h), y)

    train(t, Step(forward))


forward_habit(
    "one layer used three times", lambda s, x: s.net(s.more(s.more(s.more(x)))), parts=lambda: {"more": nn.Linear(8, 8)}
)
forward_habit(
    "LoRA: a frozen weight and two small ones",
    lambda s, x: s.net(F.linear(x, s.base.weight + s.up @ s.down)),
    parts=lambda: {
        "base": nn.Linear(8, 8).requires_grad_(requires_grad=False),
        "up": nn.Parameter(torch.zeros(8, 2)),
        "down": nn.Parameter(torch.randn(2, 8)),
    },
)
forward_habit(
    "frozen backbone under no_grad", lambda s, x: s.net(_without(s.more, x)), parts=lambda: {"more": nn.Linear(8, 8)}
)
forward_habit("parameter that nobody reads", lambda s, x: s.net(x), parts=lambda: {"unused": nn.Linear(3, 3)})
forward_habit(
    "parameters in a list and a dict",
    lambda s, x: s.net(x * s.scales[0] + s.shifts["in"]),
    parts=lambda: {
        "scales": nn.ParameterList([nn.Parameter(torch.ones(8))]),
        "shifts": nn.ParameterDict({"in": nn.Parameter(torch.zeros(8))}),
    },
)
forward_habit(
    "learnt scale of one number",
    lambda s, x: s.net(x) * s.scale,
    parts=lambda: {"scale": nn.Parameter(torch.tensor(0.5))},
)
forward_habit(
    "weights made by a network (hypernetwork)",
    lambda s, x: F.linear(s.net.a(x), s.maker(s.code).view(4, 16)),
    parts=lambda: {
        "maker": nn.Linear(3, 64),
        "code": nn.Parameter(torch.randn(1, 3)),
    },
)
forward_habit(
    "weight standardized in forward",
    lambda s, x: s.net.b(torch.tanh(F.linear(x, s.net.a.weight - s.net.a.weight.mean(1, keepdim=True), s.net.a.bias))),
)
forward_habit(
    "spectral_norm of parametrizations",
    lambda s, x: s.net(s.more(x)),
    parts=lambda: {"more": parametrizations.spectral_norm(nn.Linear(8, 8))},
)
forward_habit(
    "weight_norm of parametrizations",
    lambda s, x: s.net(s.more(x)),
    parts=lambda: {"more": parametrizations.weight_norm(nn.Linear(8, 8))},
)
forward_habit(
    "orthogonal of parametrizations",
    lambda s, x: s.net(s.more(x)),
    parts=lambda: {"more": parametrizations.orthogonal(nn.Linear(8, 8))},
)


def _old(kind: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(nn.Linear(8, 8))


forward_habit("weight_norm, the old one", lambda s, x: s.net(s.more(x)), parts=lambda: {"more": _old(weight_norm)})
forward_habit(
    "spectral_norm, the old one", lambda s, x: s.net(s.more(x)), parts=lambda: {"more": _old(nn.utils.spectral_norm)}
)


def _without(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x)


@habit("part of the network unused in some steps")
def _(t: Trial) -> None:
    short = iter([False, True, False, True])

    def forward(self: Step, x: Tensor, y: Tensor, is_short: bool) -> Tensor:
        return F.mse_loss(x[:, :4] * self.scale if is_short else self.net(x) * self.scale, y)

    net = Step(forward, scale=nn.Parameter(torch.ones(4)))
    train(t, net, steps=4, loss_of=lambda step, x, y: step(x, y, next(short)))


@habit("head chosen by the task")
def _(t: Trial) -> None:
    tasks = iter(["a", "b", "a", "b"])

    def forward(self: Step, x: Tensor, y: Tensor, task: str) -> Tensor:
        return F.mse_loss(self.heads[task](torch.tanh(self.net(x))), y)

    net = Step(forward, heads=nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}))
    train(t, net, steps=4, loss_of=lambda step, x, y: step(x, y, next(tasks)))


# -- norms -------------------------------------------------------------------------------------------------------------

forward_habit("batch norm", lambda s, x: s.net(s.norm(x)), parts=lambda: {"norm": nn.BatchNorm1d(8)})
forward_habit(
    "batch norm with momentum None",
    lambda s, x: s.net(s.norm(x)),
    parts=lambda: {"norm": nn.BatchNorm1d(8, momentum=None)},
)
forward_habit(
    "batch norm without statistics",
    lambda s, x: s.net(s.norm(x)),
    parts=lambda: {"norm": nn.BatchNorm1d(8, track_running_stats=False)},
)
forward_habit(
    "batch norm frozen by eval()", lambda s, x: s.net(s.norm.eval()(x)), parts=lambda: {"norm": nn.BatchNorm1d(8)}
)
forward_habit(
    "layer, group and instance norm",
    lambda s, x: s.net(s.one(s.two(x)) + s.three(x.view(-1, 2, 4)).flatten(1)),
    parts=lambda: {
        "one": nn.LayerNorm(8),
        "two": nn.GroupNorm(2, 8),
        "three": nn.InstanceNorm1d(2, affine=True),
    },
)
forward_habit(
    "RMS norm by hand",
    lambda s, x: s.net(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * s.scale),
    parts=lambda: {"scale": nn.Parameter(torch.ones(8))},
)
forward_habit("batch statistics by hand", lambda s, x: s.net((x - x.mean(0)) / (x.std(0) + 1e-3)))
forward_habit("virtual batch norm over the features of all rows", lambda s, x: s.net((x - x.mean()) / x.std()))


@habit("batch norm, then evaluation")
def _(t: Trial) -> None:
    net = Criterion(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    step = train(t, net)
    step.eval()
    with torch.no_grad():
        t.loss(step(*t.batch()), "evaluation")


# -- sequences and images ----------------------------------------------------------------------------------------------


@habit("transformer layer with a padding mask", cuts=3)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(5) >= lengths[:, None]
        h = self.layer(x, src_key_padding_mask=padding)
        keep = (~padding).double()[..., None]
        return F.mse_loss((self.net(h) * keep).sum(1) / keep.sum(1), y)

    def batch() -> tuple[Tensor, ...]:
        return t.mine(t.randn(8, 5, 8)), t.mine(t.randn(8, 4)), t.mine(torch.tensor([5, 1, 2, 3, 4, 5, 5, 2]))

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    train(t, Step(forward, layer=layer), batch=batch)


@habit("language model with padding", cuts=3)
def _(t: Trial) -> None:
    lengths = torch.tensor([6, 2, 3, 2, 6, 6, 5, 6])

    def batch() -> tuple[Tensor]:
        words = t.randint(11, 8, 6) + 1
        return (t.mine(torch.where(torch.arange(6) < lengths[:, None], words, 0)),)

    def forward(self: Step, words: Tensor) -> Tensor:
        h = self.words(words[:, :-1]) + self.places.weight[: words.shape[1] - 1]
        h = h + F.scaled_dot_product_attention(h, h, h, is_causal=True)
        scores = self.net(h) @ self.words.weight.t()
        return F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten(), ignore_index=0)

    parts = {"words": nn.Embedding(12, 8, padding_idx=0), "places": nn.Embedding(8, 8)}
    train(t, Step(forward, Mlp(8, 16, 8), **parts), batch=batch)


@habit("multi-head attention with two results", cuts=3)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h, weights = self.attention(x, x, x)
        return F.mse_loss(self.net(h).mean(1), y) + 0.1 * weights.pow(2).mean()

    train(t, Step(forward, attention=nn.MultiheadAttention(8, 2, batch_first=True)), batch=sequences(t))


@habit("LSTM and the last step of each row", cuts=2)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        h, _ = self.inner(x)
        return F.mse_loss(self.net(h[torch.arange(len(x)), lengths - 1]), y)

    def batch() -> tuple[Tensor, ...]:
        return t.mine(t.randn(8, 5, 8)), t.mine(t.randn(8, 4)), t.mine(t.randint(5, 8) + 1)

    train(t, Step(forward, inner=nn.LSTM(8, 8, batch_first=True)), batch=batch)


@habit("GRU evaluated before it is trained, and sequences of another length", cuts=2)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(self.inner(x)[0].mean(1)), y)

    lengths = iter((3, 5, 5, 3, 5, 3))

    def batch() -> tuple[Tensor, Tensor]:
        return t.mine(t.randn(8, next(lengths), 8)), t.mine(t.randn(8, 4))

    def loss_of(step: Any, *given: Tensor) -> Tensor:
        step.eval()
        with torch.no_grad():
            t.loss(step(*batch()))
        step.train()
        return step(*given)  # type: ignore[no-any-return]

    train(t, Step(forward, inner=nn.GRU(8, 8, batch_first=True)), batch=batch, loss_of=loss_of)


@habit("packed sequences", cuts=2)
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, h = self.inner(packed)
        return F.mse_loss(self.net(h[-1]), y)

    def batch() -> tuple[Tensor, ...]:
        return t.mine(t.randn(8, 5, 8)), t.mine(t.randn(8, 4)), t.mine(torch.tensor([5, 1, 2, 3, 4, 5, 5, 2]))

    train(t, Step(forward, inner=nn.GRU(8, 8, batch_first=True)), batch=batch)


@habit("convolutions, pooling and upsampling")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        down = F.max_pool2d(F.relu(self.one(x)), 2)
        up = F.interpolate(self.two(down), scale_factor=2, mode="bilinear", align_corners=False)
        return F.mse_loss(self.net(F.adaptive_avg_pool2d(torch.cat([x, up], 1), (2, 1)).flatten(1)), y)

    def batch() -> tuple[Tensor, Tensor]:
        return t.mine(t.randn(8, 2, 4, 4)), t.mine(t.randn(8, 4))

    train(t, Step(forward, one=nn.Conv2d(2, 4, 3, padding=1), two=nn.Conv2d(4, 2, 1)), batch=batch)


@habit("bags of words of uneven length")
def _(t: Trial) -> None:
    def batch() -> tuple[Tensor, ...]:
        return t.mine(t.randint(16, 8, 5)), t.mine(t.randn(8, 4)), t.mine(t.randn(8, 5))

    def forward(self: Step, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return F.mse_loss(self.net(self.bag(x, per_sample_weights=weights)), y)

    train(t, Step(forward, bag=nn.EmbeddingBag(16, 8, mode="sum")), batch=batch)


# -- operators ---------------------------------------------------------------------------------------------------------

forward_habit(
    "FFT",
    lambda s, x: s.net(torch.fft.irfft(torch.fft.rfft(x) * s.gain, n=8)),
    parts=lambda: {"gain": nn.Parameter(torch.ones(5))},
)
forward_habit(
    "complex weights",
    lambda s, x: s.net((torch.view_as_complex(x.view(-1, 4, 2)) @ torch.view_as_complex(s.w)).abs().repeat(1, 2)),
    parts=lambda: {"w": nn.Parameter(torch.randn(4, 4, 2))},
)
forward_habit(
    "rotary positions",
    lambda s, x: s.net(
        torch.stack([x[:, ::2] * 0.6 - x[:, 1::2] * 0.8, x[:, ::2] * 0.8 + x[:, 1::2] * 0.6], -1).flatten(1)
    ),
)
forward_habit(
    "einsum and outer products",
    lambda s, x: s.net(torch.einsum("bi,ij,bj->bi", x, s.w, x)),
    parts=lambda: {"w": nn.Parameter(torch.randn(8, 8) * 0.1)},
)
forward_habit(
    "sort, cumsum, top-k", lambda s, x: s.net(x.sort(1).values + x.cumsum(1) * 0.1 + F.pad(x.topk(3, 1).values, (0, 5)))
)
forward_habit("cumulative sum over the batch", lambda s, x: s.net(x + 0.1 * x.cumsum(0)))
forward_habit("each row minus the row before", lambda s, x: s.net(x - torch.cat([x[:1], x[:-1]])))
forward_habit("gather and one_hot", lambda s, x: s.net(x.gather(1, x.argsort(1)) + F.one_hot(x.argmax(1), 8)))
forward_habit(
    "straight-through arg max", lambda s, x: s.net(x) + (F.one_hot(s.net(x).argmax(1), 4) - s.net(x)).detach()
)
forward_habit(
    "solve and inverse",
    lambda s, x: s.net(torch.linalg.solve(torch.eye(8) + s.w @ s.w.t(), x.t()).t()),
    parts=lambda: {"w": nn.Parameter(torch.randn(8, 8) * 0.1)},
)
forward_habit(
    "pairwise distances",
    lambda s, x: s.net(torch.cdist(x, s.points)),
    parts=lambda: {"points": nn.Parameter(torch.randn(8, 8))},
)
forward_habit("logsumexp over the batch", lambda s, x: s.net(x) - s.net(x).logsumexp(0))
forward_habit("softmax over the batch", lambda s, x: s.net(x).softmax(0))
forward_habit(
    "soft mixture of experts",
    lambda s, x: (torch.stack([e(x) for e in s.experts], 1) * s.gate(x).softmax(1)[..., None]).sum(1),
    parts=lambda: {
        "experts": nn.ModuleList(nn.Linear(8, 4) for _ in range(3)),
        "gate": nn.Linear(8, 3),
    },
)


def _switch(self: Step, x: Tensor) -> Tensor:
    """Each row goes to one expert, as long as that has room."""
    score = self.gate(x).softmax(1)
    best, which = score.max(1)
    chosen = F.one_hot(which, 3)
    place = (chosen.cumsum(0) * chosen).sum(1)
    best = best * (place <= 4)
    out = torch.stack([e(x) for e in self.experts], 1)
    return out[torch.arange(len(x)), which] * best[:, None] + 0.01 * (score.mean(0) * chosen.double().mean(0)).sum()


forward_habit(
    "switch of experts with room for four rows",
    _switch,
    parts=lambda: {
        "experts": nn.ModuleList(nn.Linear(8, 4) for _ in range(3)),
        "gate": nn.Linear(8, 3),
    },
)
forward_habit(
    "rows of an expert chosen by a mask",
    lambda s, x: s.net(torch.zeros_like(x).index_put((x[:, 0] > 0,), s.more(x[x[:, 0] > 0]))),
    parts=lambda: {"more": nn.Linear(8, 8)},
)


def _quantized(self: Step, x: Tensor) -> Tensor:
    """A codebook that follows the batch (VQ-EMA)."""
    h = self.net(x)
    near = torch.cdist(h, self.book).argmin(1)
    hot = F.one_hot(near, 6).double()
    if self.training:
        self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.total.mul_(0.9).add_(hot.t() @ h.detach(), alpha=0.1)
        self.book.copy_(self.total / (self.count[:, None] + 1e-3))
    picked = self.book[near]
    return h + (picked - h).detach() + 0.25 * (h - picked.detach()) ** 2


@habit("codebook that follows the batch (VQ-EMA)")
def _(t: Trial) -> None:
    net = Step(lambda self, x, y: F.mse_loss(_quantized(self, x), y))
    book = torch.randn(6, 4)
    for name, value in (("book", book), ("count", torch.ones(6)), ("total", book.clone())):
        net.register_buffer(name, value)
    train(t, net)


@habit("memory bank of the last rows")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = F.normalize(self.net(x), dim=1)
        scores = torch.cat([(h * y).sum(1, keepdim=True), h @ self.bank.clone().t()], 1)
        self.bank = torch.cat([h.detach(), self.bank])[:16]
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))

    net = Step(forward)
    net.register_buffer("bank", torch.randn(16, 4))
    train(t, net)


@habit("class centres that the loss reads and the call moves")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = self.net(x)
        loss = F.mse_loss(h, self.centres[y])
        with torch.no_grad():
            self.centres.index_add_(0, y, (h - self.centres[y]) * 0.1)
        return loss

    net = Step(forward)
    net.register_buffer("centres", torch.zeros(4, 4))
    train(t, net, batch=lambda: (t.mine(t.randn(8, 8)), t.mine(t.randint(4, 8))))


# -- checkpointing, transforms, hooks ----------------------------------------------------------------------------------

forward_habit(
    "checkpoint_sequential",
    lambda s, x: s.net(checkpoint_sequential(s.stack, 2, x, use_reentrant=False)),
    parts=lambda: {
        "stack": nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
    },
)
forward_habit(
    "checkpoint in a loop over layers",
    lambda s, x: s.net(functools.reduce(lambda h, m: h + checkpoint(m, h, use_reentrant=False), s.stack, x)),
    parts=lambda: {
        "stack": nn.ModuleList(nn.Linear(8, 8) for _ in range(2)),
    },
)
forward_habit("vmap over the rows", lambda s, x: torch.vmap(lambda row: s.net.b(torch.tanh(s.net.a(row))))(x))
forward_habit(
    "vmap over stacked weights",
    lambda s, x: torch.vmap(lambda w: x @ w)(s.w).mean(0),
    parts=lambda: {"w": nn.Parameter(torch.randn(3, 8, 4))},
)
forward_habit(
    "func.grad inside",
    lambda s, x: s.net(torch.func.grad(lambda v: s.more(v).pow(2).sum())(x)),
    parts=lambda: {"more": nn.Linear(8, 8)},
)
forward_habit("jvp inside", lambda s, x: torch.func.jvp(s.net, (x,), (torch.ones_like(x),))[1])
forward_habit(
    "functional_call with the network's weights",
    lambda s, x: torch.func.functional_call(s.net, {n: p * 0.5 for n, p in s.net.named_parameters()}, (x,)),
)


@habit("per-sample gradients outside, by vmap", WITH_RESULTS)
def _(t: Trial) -> None:
    net = Criterion(Mlp())

    def after(net: Any, _number: int) -> None:
        weights = {n: p.detach() for n, p in net.net.named_parameters()}
        each = torch.func.vmap(
            torch.func.grad(lambda w, row: torch.func.functional_call(net.net, w, (row,)).pow(2).sum()), (None, 0)
        )(weights, torch.ones(3, 8))
        t.whole(each["a.bias"], "gradients of rows")

    train(t, net, after=after)


def hooked(name: str, add: Callable[[Criterion], Any]) -> None:
    @habit(name)
    def _(t: Trial) -> None:
        net = Criterion(Mlp())
        add(net)
        train(t, net)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


hooked("hook: forward", lambda net: net.net.a.register_forward_hook(lambda m, a, out: out * 2))
hooked("hook: forward pre", lambda net: net.net.b.register_forward_pre_hook(lambda m, a: (a[0] + 1,)))
hooked("hook: full backward", lambda net: net.net.b.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)))
hooked("hook: full backward pre", lambda net: net.net.b.register_full_backward_pre_hook(lambda m, o: (o[0] * 2,)))
hooked("hook: of a parameter", lambda net: net.net.a.weight.register_hook(lambda g: g * 0.5))
hooked(
    "hook: of a parameter, clipping by its norm",
    lambda net: net.net.a.weight.register_hook(lambda g: g * (0.01 / g.norm()).clamp(max=1)),
)
hooked("hook: after accumulation", lambda net: net.net.a.weight.register_post_accumulate_grad_hook(_halve))
hooked("hook: forward of the whole", lambda net: net.register_forward_hook(lambda m, a, out: out * 0.5))


@habit("hook: removed between steps")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    handle = net.net.a.register_forward_hook(lambda m, a, out: out * 2)
    train(t, net, after=lambda net, n: handle.remove())


@habit("hook: of an activation, made in forward")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        h = self.net.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return F.mse_loss(self.net.b(h), y)

    train(t, Step(forward))


@habit("hook: an exception caught in forward")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        try:
            h = self.missing(x)
        except AttributeError:
            h = self.net(x)
        return F.mse_loss(h, y)

    train(t, Step(forward))


@habit("error of the network's own is caught by its type")
def _(t: Trial) -> None:
    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[1] != 8:
            raise ValueError(f"{x.shape[1]} features")
        return F.mse_loss(self.net(x), y)

    net = Step(forward)
    step = t.wrap(net)
    try:
        step(t.mine(t.randn(8, 5)), t.mine(t.randn(8, 4)))
        t.whole(0, "nothing was raised")
    except ValueError as error:
        t.whole(int(str(error)[0]), "caught")
    t.loss(step(*t.batch()))


# -- Python in forward -------------------------------------------------------------------------------------------------


class Kind(Enum):
    FULL = "full"
    HALF = "half"


class Settings:
    def __init__(self) -> None:
        self.scale, self.kind = 0.5, Kind.HALF

    @property
    def both(self) -> float:
        return self.scale * 2


forward_habit(
    "numpy array as an attribute",
    lambda s, x: s.net(x * torch.from_numpy(s.k)),
    parts=lambda: {"k": np.linspace(0.5, 1, 8)},
)
forward_habit("numpy computes constants in forward", lambda s, x: s.net(x * torch.from_numpy(np.sqrt(np.arange(1, 9)))))
forward_habit("numpy number as a factor", lambda s, x: s.net(x) * np.float64(0.5))
forward_habit(
    "tensor kept as a plain attribute", lambda s, x: s.net(x * s.k[0]), parts=lambda: {"k": [torch.linspace(0.5, 1, 8)]}
)
forward_habit(
    "settings in an object, an enum, a property",
    lambda s, x: s.net(x) * (s.settings.both if s.settings.kind is Kind.HALF else 9),
    parts=lambda: {"settings": Settings()},
)
forward_habit(
    "loop, comprehension, zip and sorted",
    lambda s, x: sum(w * s.net(x) for w, _ in sorted(zip([0.5, 0.2], "ba", strict=True))),
)
forward_habit("recursion over layers", lambda s, x: _down(list(s.net.children()), x))
forward_habit("assert and print", lambda s, x: (_check(x), s.net(x))[1])
forward_habit("autocast off inside", lambda s, x: _in_full(s, x))
forward_habit(
    "types mixed: float32 part of a float64 network",
    lambda s, x: s.net(s.more(x.float()).double()),
    limit=1e-6,
    parts=lambda: {"more": nn.Linear(8, 8).float()},
)
forward_habit(
    "identity put in by nn.Identity and Flatten", lambda s, x: s.net(nn.Flatten()(nn.Identity()(x.view(-1, 2, 4))))
)
forward_habit("lru_cache in forward", lambda s, x: s.net(x + _positions(8)))
forward_habit(
    "buffer that is not saved",
    lambda s, x: s.net(x + s.shift),
    parts=lambda: {"shift": nn.Buffer(torch.ones(8), persistent=False)},
)
forward_habit("custom Function with two results, one of them whole numbers", lambda s, x: s.net(_Ranked.apply(x)[0]))
forward_habit("set_grad_enabled in forward", lambda s, x: s.net(x) + _maybe(s, x).detach())
forward_habit("inner torch.compile", lambda s, x: s.net(torch.compile(lambda v: v * 2 + 1, backend="eager")(x)))


class _Ranked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = x.sort(1)
        ctx.save_for_backward(order)
        ctx.mark_non_differentiable(order)
        return values, order

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(1, order, gradient)


def _down(layers: list[nn.Module], x: Tensor) -> Tensor:
    return x if not layers else _down(layers[1:], torch.tanh(layers[0](x)))


def _check(x: Tensor) -> None:
    assert x.dim() == 2, x.shape
    assert x.shape[1] == 8


def _in_full(self: Step, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.net(x)


def _maybe(self: Step, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        return self.net(x.flip(1))


@functools.lru_cache
def _positions(width: int) -> Tensor:
    return torch.linspace(0, 1, width)


@habit("torch.compile around what is wrapped")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    step = torch.compile(t.wrap(net), backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(2):
        loss = step(*t.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.loss(loss)


@habit("torch.compile inside what is wrapped")
def _(t: Trial) -> None:
    net = Criterion(Mlp())
    net.net.compile(backend="eager")
    train(t, net)


@habit("autocast in bfloat16 inside")
def _(t: Trial) -> None:
    """A difference of rounding is none here: the loss is made in whole steps."""

    def forward(self: Step, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.net.b(torch.tanh(self.net.a(x)))
        return F.mse_loss(h.double().round(), y) + F.mse_loss(self.net(x), y)

    train(t, Step(forward), steps=1)


@habit("a network after others that were refused")
def _(t: Trial) -> None:
    """What a failed capture leaves would show."""
    for forward in (
        lambda s, x: torch.vmap(lambda row: s.net.b(torch.tanh(s.net.a(row))))(x).mean(),
        lambda s, x: torch.func.grad(lambda v: s.net(v).pow(2).sum())(x).mean(),
        lambda s, x: s.net(x).mean() * random.uniform(0.5, 1.5),
        lambda s, x: s.net(x[x[:, 0] > 0]).mean(),
        lambda s, x: s.missing(x),
    ):
        with contextlib.suppress(MsrunError, AttributeError):
            t.wrap(Step(forward))(t.mine(t.randn(8, 8)))
    random.seed(0)
    train(t, Criterion(Mlp()))


@habit("weights tied after the first step")
def _(t: Trial) -> None:
    net = Criterion(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)))

    def after(_net: Any, number: int) -> None:
        if number == 0:
            net.net[1].bias = net.net[1].weight

    train(t, net, after=after)
