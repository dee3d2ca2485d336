"""What networks are made of, and what changes in them: weights, norms, transforms, hooks, Python in forward."""

import contextlib
import random
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from random_networks.functions import Normalized, StraightThrough
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from msrun.errors import MsrunError
from msrun.runtime import GradAccumulation, MicroBatchInterleaved, shard
from training_habits.trial import (
    CAPTURED,
    MODES,
    OWN_ROWS,
    WITH_RESULTS,
    WORLD_SIZE,
    Criterion,
    Mlp,
    Step,
    habit,
    scores,
    step_habit,
    train,
)


def square():
    return nn.Linear(8, 8)


# -- weights -----------------------------------------------------------------------------------------------------------


@habit("weights tied between embedding and head")
def _(t):
    net = Criterion(nn.Sequential(nn.Embedding(16, 8), nn.Tanh(), nn.Linear(8, 16, bias=False)), F.cross_entropy)
    net.net[2].weight = net.net[0].weight
    train(t, net, batch=lambda t: (t.randint(16, 8), t.randint(16, 8)))


def _old(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(square())


scores(
    "LoRA: a frozen weight and two small ones",
    lambda s, x: s.net(F.linear(x, s.base.weight + s.up @ s.down)),
    base=lambda: square().requires_grad_(requires_grad=False),
    up=lambda: nn.Parameter(torch.zeros(8, 2)),
    down=lambda: nn.Parameter(torch.randn(2, 8)),
)
scores("parameter that nobody reads", lambda s, x: s.net(x), unused=square)
for _name, _make in (
    ("spectral_norm of parametrizations", lambda: parametrizations.spectral_norm(square())),
    ("weight_norm of parametrizations", lambda: parametrizations.weight_norm(square())),
    ("weight_norm, the old one", lambda: _old(weight_norm)),
    ("spectral_norm, the old one", lambda: _old(spectral_norm)),
):
    scores(_name, lambda s, x: s.net(s.more(x)), more=_make)


@step_habit(
    "part of the network unused in some steps",
    parts=lambda: {"scale": nn.Parameter(torch.ones(4))},
    more=[False, True, False, True],
    steps=4,
)
def _(s, x, y, is_short):
    return F.mse_loss(x[:, :4] * s.scale if is_short else s.net(x) * s.scale, y)


@step_habit(
    "head chosen by the task",
    parts=lambda: {"heads": nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})},
    more=["a", "b", "a", "b"],
    steps=4,
)
def _(s, x, y, task):
    return F.mse_loss(s.heads[task](torch.tanh(s.net(x))), y)


# -- norms and buffers -------------------------------------------------------------------------------------------------

scores("batch norm with momentum None", lambda s, x: s.net(s.norm(x)), norm=lambda: nn.BatchNorm1d(8, momentum=None))


@habit("batch norm, then evaluation")
def _(t):
    step = train(t, Criterion(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))))
    step.eval()
    with torch.no_grad():
        t.loss(step(*t.batch()), "evaluation")


def _quantized(s, x):
    h = s.net(x)
    near = torch.cdist(h, s.book).argmin(1)
    hot = F.one_hot(near, 6).double()
    s.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
    s.total.mul_(0.9).add_(hot.t() @ h.detach(), alpha=0.1)
    s.book.copy_(s.total / (s.count[:, None] + 1e-3))
    picked = s.book[near]
    return h + (picked - h).detach() + 0.25 * (h - picked.detach()) ** 2


scores(
    "codebook that follows the batch (VQ-EMA)",
    _quantized,
    book=lambda: torch.arange(24.0).sin().view(6, 4),
    total=lambda: torch.arange(24.0).sin().view(6, 4),
    count=lambda: torch.ones(6),
)


class Decoder(nn.Module):
    """Of images, down and up again with a skip: pads, interpolates, transposes; keeps an average of what comes in."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(8, momentum=0.3)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1)
        self.head = nn.Conv2d(7, 6, 1)
        self.average = nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        given, x = x, x - self.center.view(3, 1, 1)
        with torch.no_grad():
            self.center.mul_(0.9).add_(given.mean((0, 2, 3)), alpha=0.1)
        small = F.silu(self.norm(self.down(x)), inplace=True)
        large = self.up(self.pool(self.depthwise(F.interpolate(small, scale_factor=2.0))))
        return self.average(self.head(torch.cat([large, x], 1))).flatten(1)


def _cut_rows_and_channels(net):
    by_rows = ((1, 1, WORLD_SIZE, 1), (1, 1, 1, 1))
    channels = ((1, 1, 1, 1), (WORLD_SIZE, 1, 1, 1))
    cuts = {"down": channels, "norm": ((1, 1, WORLD_SIZE, 1),), "depthwise": by_rows, "up": by_rows}
    for path, cut in {**cuts, "pool": ((1, WORLD_SIZE, 1, 1),), "average": ((1, 1, WORLD_SIZE, 1),)}.items():
        shard(net.get_submodule(f"net.{path}"), cut)
    return net


def _of_images(name, make=lambda net: net, modes=MODES):
    @habit(f"decoder of images{name}", modes)
    def _(t):
        net = make(Criterion(Decoder(), F.cross_entropy))
        train(t, net, batch=lambda t: (t.randn(8, 3, 16, 16), t.randint(6, 8)))


_of_images("")
_of_images(", cut by rows and channels", _cut_rows_and_channels, CAPTURED[:3])

# -- sequences ---------------------------------------------------------------------------------------------------------

LENGTHS = torch.tensor([5, 1, 2, 3, 4, 5, 5, 2])


def _sequences(t):
    return t.randn(8, 5, 8), t.randn(8, 4), LENGTHS


@step_habit(
    "transformer layer with a padding mask",
    cuts=3,
    batch=_sequences,
    parts=lambda: {"layer": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)},
)
def _(s, x, y, lengths):
    padding = torch.arange(5) >= lengths[:, None]
    keep = (~padding).double()[..., None]
    return F.mse_loss((s.net(s.layer(x, src_key_padding_mask=padding)) * keep).sum(1) / keep.sum(1), y)


@step_habit(
    "language model with padding",
    cuts=3,
    batch=lambda t: (torch.where(torch.arange(5) < LENGTHS[:, None], t.randint(11, 8, 5) + 1, 0),),
    net=lambda: Mlp(8, 16, 8),
    parts=lambda: {"words": nn.Embedding(12, 8, padding_idx=0), "places": nn.Embedding(8, 8)},
)
def _(s, words):
    h = s.words(words[:, :-1]) + s.places.weight[: words.shape[1] - 1]
    h = h + F.scaled_dot_product_attention(h, h, h, is_causal=True)
    return F.cross_entropy((s.net(h) @ s.words.weight.t()).flatten(0, 1), words[:, 1:].flatten(), ignore_index=0)


@step_habit("packed sequences", batch=_sequences, parts=lambda: {"inner": nn.GRU(8, 8, batch_first=True)})
def _(s, x, y, lengths):
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return F.mse_loss(s.net(s.inner(packed)[1][-1]), y)


@habit("GRU evaluated before it is trained, and sequences of another length", cuts=2)
def _(t):
    lengths = iter((3, 5, 5, 3, 5, 3))

    def batch(t):
        return t.randn(8, next(lengths), 8), t.randn(8, 4)

    def loss_of(step, *given):
        step.eval()
        with torch.no_grad():
            t.loss(step(*map(t.mine, batch(t))))
        step.train()
        return step(*given)

    net = Step(lambda s, x, y: F.mse_loss(s.net(s.inner(x)[0].mean(1)), y), inner=nn.GRU(8, 8, batch_first=True))
    train(t, net, batch=batch, loss_of=loss_of)


# -- operators ---------------------------------------------------------------------------------------------------------


def _switch(s, x):
    """Each row goes to one expert, as long as that has room."""
    score = s.gate(x).softmax(1)
    best, which = score.max(1)
    chosen = F.one_hot(which, 3)
    best = best * ((chosen.cumsum(0) * chosen).sum(1) <= 4)
    out = torch.stack([expert(x) for expert in s.experts], 1)
    return out[torch.arange(len(x)), which] * best[:, None] + 0.01 * (score.mean(0) * chosen.double().mean(0)).sum()


scores("straight-through estimator", lambda s, x: s.net.b(StraightThrough.apply(s.net.a(x))))
scores(
    "function that looks at the whole batch",
    lambda s, x: Normalized.apply(s.net(x), s.weight)[0],
    weight=lambda: nn.Parameter(torch.ones(4)),
)
_cut_rounding = shard(lambda h: StraightThrough.apply(h), ((1, 2),), ((1, 2),))
scores("function cut as the user says", lambda s, x: s.net.b(_cut_rounding(s.net.a(x))), modes=CAPTURED)
scores(
    "FFT",
    lambda s, x: s.net(torch.fft.irfft(torch.fft.rfft(x) * s.gain, n=8)),
    gain=lambda: nn.Parameter(torch.ones(5)),
)
scores(
    "complex weights",
    lambda s, x: s.net((torch.view_as_complex(x.view(-1, 4, 2)) @ torch.view_as_complex(s.w)).abs().repeat(1, 2)),
    w=lambda: nn.Parameter(torch.randn(4, 4, 2)),
)
scores("each row minus the row before", lambda s, x: s.net(x - torch.cat([x[:1], x[:-1]])))
scores("straight-through arg max", lambda s, x: s.net(x) + (F.one_hot(s.net(x).argmax(1), 4) - s.net(x)).detach())
scores("softmax over the batch", lambda s, x: s.net(x).softmax(0))
scores(
    "switch of experts with room for four rows",
    _switch,
    experts=lambda: nn.ModuleList(nn.Linear(8, 4) for _ in range(3)),
    gate=lambda: nn.Linear(8, 3),
)
scores(
    "rows of an expert chosen by a mask",
    lambda s, x: s.net(torch.zeros_like(x).index_put((x[:, 0] > 0,), s.more(x[x[:, 0] > 0]))),
    more=square,
)
scores(
    "nn.Transformer whose mask is made in forward",
    lambda s, x: s.net(s.inner(x[None], x[None], tgt_mask=nn.Transformer.generate_square_subsequent_mask(8))[0]),
    inner=lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
    modes=CAPTURED,  # a mask for the rows of the whole batch
)
scores(
    "types mixed: float32 part of a float64 network",
    lambda s, x: s.net(s.more(x.float()).double()),
    limit=1e-6,
    more=lambda: square().float(),
)

# -- checkpointing, transforms, compilers ------------------------------------------------------------------------------


def _checkpointed(*, use_reentrant):
    def forward(s, x):
        for _ in range(2):
            x = checkpoint(lambda h: s.more(h).tanh(), s.more(x), use_reentrant=use_reentrant)
        return s.net(x)

    return forward


scores("checkpoint", _checkpointed(use_reentrant=False), more=square)
scores("reentrant checkpoint", _checkpointed(use_reentrant=True), more=square)
scores(
    "reentrant checkpoint of a layer that nothing else reaches",
    lambda s, x: s.net(checkpoint(s.more, s.inner(x), use_reentrant=True)),
    more=square,
    inner=square,
    modes=OWN_ROWS,
)
scores(
    "vmap over stacked weights",
    lambda s, x: torch.vmap(lambda w: x @ w)(s.w).mean(0),
    w=lambda: nn.Parameter(torch.randn(3, 8, 4)),
)
scores("func.grad inside", lambda s, x: s.net(torch.func.grad(lambda v: s.more(v).pow(2).sum())(x)), more=square)
scores(
    "functional_call with the network's weights",
    lambda s, x: torch.func.functional_call(s.net, {n: p * 0.5 for n, p in s.net.named_parameters()}, (x,)),
)


@habit("per-sample gradients outside, by vmap", WITH_RESULTS)
def _(t):
    def after(net, _number):
        def loss(weights, row):
            return torch.func.functional_call(net.net, weights, (row,)).pow(2).sum()

        weights = {name: p.detach() for name, p in net.net.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.ones(3, 8))
        t.whole(each["a.bias"], "gradients of rows")

    train(t, Criterion(), after=after)


def compiled(name, wrap):
    """A habit of compiling: `wrap` gives what is called, of the trial and a network."""

    @habit(f"torch.compile {name}")
    def _(t):
        net = Criterion()
        step = wrap(t, net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in range(2):
            loss = step(*t.batch())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.loss(loss)


def _in_a_function(t, net):
    step = t.wrap(net)
    return torch.compile(lambda *given: step(*given), backend="eager")


compiled("around what is wrapped", lambda t, net: torch.compile(t.wrap(net), backend="eager"))
compiled("of a function that calls what is wrapped", _in_a_function)
compiled("inside of what is wrapped", lambda t, net: t.wrap(torch.compile(net, backend="eager")))
scores("inner torch.compile", lambda s, x: s.net(torch.compile(lambda v: v * 2 + 1, backend="eager")(x)))

# -- hooks -------------------------------------------------------------------------------------------------------------


def _halve(parameter):
    parameter.grad.mul_(0.5)


def hooked(name, add):
    @habit(f"hook: {name}")
    def _(t):
        net = Criterion()
        add(net)
        train(t, net)


hooked("full backward", lambda net: net.net.b.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)))
hooked("full backward pre", lambda net: net.net.b.register_full_backward_pre_hook(lambda m, o: (o[0] * 2,)))
hooked("of a parameter", lambda net: net.net.a.weight.register_hook(lambda g: g * 0.5))
hooked(
    "of a parameter, clipping by its norm",
    lambda net: net.net.a.weight.register_hook(lambda g: g * (0.01 / g.norm()).clamp(max=1)),
)
hooked("after accumulation", lambda net: net.net.a.weight.register_post_accumulate_grad_hook(_halve))


@habit("hook: of a module, removed between steps")
def _(t):
    net = Criterion()
    net.net.b.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    handle = net.net.a.register_forward_hook(lambda m, args, out: out * 2)
    train(t, net, after=lambda net, n: handle.remove())


def _hooked(hook):
    def forward(s, x):
        h = s.net.a(x)
        if h.requires_grad:
            h.register_hook(hook)
        return s.net.b(h)

    return forward


scores("hook: of an activation, made in forward", _hooked(lambda g: g.clamp(-0.01, 0.01)))
scores("tensor hook that looks at the whole gradient", _hooked(lambda g: g / (1 + g.norm())))


@habit("error of the network's own is caught by its type")
def _(t):
    def forward(s, x, y):
        if x.shape[1] != 8:
            raise ValueError(f"{x.shape[1]} features")
        return F.mse_loss(s.net(x), y)

    step = t.wrap(Step(forward))
    try:
        step(t.mine(t.randn(8, 5)), t.mine(t.randn(8, 4)))
        t.whole(0, "nothing was raised")
    except ValueError as error:
        t.whole(int(str(error)[0]), "caught")
    t.loss(step(*t.batch()))


# -- Python in forward -------------------------------------------------------------------------------------------------


@dataclass
class Result:
    hidden: Tensor
    mean: Tensor


def _structured(s, x, y):
    h = s.net.a(x)
    return F.mse_loss(s.net.b(h), y), Result(h, h.mean()), {"h": [h, None, 3]}


step_habit("dataclass among the results", loss_of=lambda step, x, y: step(x, y)[0])(_structured)
scores("numpy computes constants in forward", lambda s, x: s.net(x * torch.from_numpy(np.sqrt(np.arange(1, 9)))))
scores("tensor kept as a plain attribute", lambda s, x: s.net(x * s.k[0]), k=lambda: [torch.linspace(0.5, 1, 8)])


@step_habit("autocast in bfloat16 inside", steps=1)
def _(s, x, y):
    """A difference of rounding is none here: the loss is made in whole steps."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = s.net.b(torch.tanh(s.net.a(x)))
    return F.mse_loss(h.double().round(), y) + F.mse_loss(s.net(x), y)


@habit("a network after others that were refused")
def _(t):
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
    train(t, Criterion())


# -- attributes that change --------------------------------------------------------------------------------------------


def after_the_first(change):
    def between(net, step):
        if step == 1:
            torch.manual_seed(7)
            change(net)

    return between


def _scaled(s, x):
    return s.net(x) * s.scale


scores("attribute that changes", _scaled, lambda net, n: setattr(net, "scale", 1.0 - n / 4), scale=lambda: 1.0)
scores(
    "buffer that is assigned",
    _scaled,
    lambda net, n: setattr(net, "scale", torch.full((4,), 1.0 + n)),
    scale=lambda: torch.ones(4),
)
scores(
    "value in a dict that changes",
    lambda s, x: s.net(x) + s.settings["beta"],
    lambda net, n: net.settings.update(beta=float(n)),
    settings=lambda: {"beta": 0.0},
)
for _name, _change in (
    ("parameter that is assigned", lambda net: setattr(net.net.a, "weight", nn.Parameter(torch.randn(16, 8)))),
    ("module that is assigned", lambda net: setattr(net.net, "a", nn.Linear(8, 16))),
    ("hook that comes later", lambda net: net.net.a.register_forward_hook(lambda _module, _args, result: result * 2)),
):
    scores(_name, lambda s, x: s.net(x), after_the_first(_change))


def _counting(s, x):
    s.calls += 1
    s.last = s.net.a(x)
    s.seen = s.seen * 0.9 + s.last.detach().mean(0)
    return s.net.b(s.last) / s.calls


def _counted(s, x):
    s.calls += 1
    return s.net(x) / s.calls


def _listed(s, x):
    s.calls.append(1.0)
    return s.net(x) / len(s.calls)


def _noted(s, x):
    s.width, s.is_called = x.shape[1], True
    return s.net(x)


scores("attributes that the forward pass sets", _counting, calls=int, seen=lambda: torch.zeros(16))
scores("number counted by the call", _counted, calls=int)
scores("list grown by the call", _listed, calls=list)
scores("attributes set to the same", _noted)

# -- other plans -------------------------------------------------------------------------------------------------------


def planned(name, make, forward, modes=CAPTURED):
    """A habit of a forward pass in a network that `make` plans: micro batches, copies, cuts of layers."""

    @habit(name, modes)
    def _(t):
        train(t, make(Step(lambda s, x, y: F.mse_loss(forward(s, x), y), calls=0)))


def _written(s, x):
    h = s.net.a(x)
    h[:, 0] = 0
    h.view(-1, 4, 4)[:, 1].mul_(3)
    y = s.net.b(h)
    y[..., 1:3] = y[..., 1:3] * 2
    return y


def _cut_by(strategy):
    def make(net):
        shard(net.net.a, strategy)
        shard(net.net.b, strategy)
        return net

    return make


planned(
    "straight-through estimator in copies and micro batches",
    lambda net: GradAccumulation(MicroBatchInterleaved(net, 2), 2),
    lambda s, x: s.net.b(StraightThrough.apply(s.net.a(x))),
)
planned("number counted by the call, in micro batches", lambda net: GradAccumulation(net, 2), _counted)
planned("number counted by the call, in copies", lambda net: MicroBatchInterleaved(net, 2), _counted)
planned("attributes set to the same, in micro batches", lambda net: GradAccumulation(net, 2), _noted)
for _cut in (((2, 1), (1, 1)), ((1, 1), (2, 1)), ((1, 2), (1, 2))):
    planned(f"columns written of layers cut by {_cut}", _cut_by(_cut), _written, modes=("semi_auto",))
