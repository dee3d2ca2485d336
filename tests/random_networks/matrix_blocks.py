"""Blocks of vectors and sequences: linear layers, weights read in pieces, attention, recurrence, norms."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from random_networks import functions
from random_networks.blocks import Block
from random_networks.case import WIDTH

ROWS = ("vectors", "sequences")


class RowBlock(Block):
    families = ROWS
    weight = 0
    is_learnt = False


class Linear(RowBlock):
    weight = 4
    cuts: ClassVar[dict[str, str]] = {"lin": "linear"}

    def __init__(self, family, bias):
        super().__init__(family)
        self.lin = nn.Linear(WIDTH, WIDTH, bias=bias)

    @classmethod
    def options(cls, rng):
        return {"bias": rng.random() < 0.7}

    def forward(self, x):
        return torch.tanh(self.written("lin", self.lin(x)))


class Mlp(RowBlock):
    weight = 4
    cuts: ClassVar[dict[str, str]] = {"up": "linear", "down": "linear"}

    def build(self):
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.written("down", self.down(F.gelu(self.written("up", self.up(x)))))


class Norm(RowBlock):
    weight = 3
    cuts: ClassVar[dict[str, str]] = {"norm": "layer_norm"}

    def build(self):
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.written("norm", self.norm(x))


class RmsNorm(RowBlock):
    def build(self):
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


def _uneven(h):
    first, rest = torch.split(h, [WIDTH, 2 * WIDTH], -1)
    return first, *rest.chunk(2, -1)


class Fused(RowBlock):
    """One layer whose result is taken apart."""

    weight = 6
    cuts: ClassVar[dict[str, str]] = {"lin": "linear"}
    ways: ClassVar[Any] = {
        "chunk": lambda h: h.chunk(3, -1),
        "split": lambda h: h.split(WIDTH, -1),
        "unbind": lambda h: h.unflatten(-1, (3, WIDTH)).unbind(-2),
        "uneven": _uneven,
    }

    def build(self):
        self.lin = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        a, b, c = self.ways[self.how](self.written("lin", self.lin(x)))
        return torch.tanh(torch.tanh(x * 0.5 + a)) * torch.sigmoid(b) + c


class WeightViews(RowBlock):
    """Reads its weight in pieces."""

    weight = 6
    ways: ClassVar[Any] = {
        "chunk": lambda w: w.chunk(2),
        "slice": lambda w: (w[:WIDTH], w[WIDTH:]),
        "split": lambda w: w.split(WIDTH),
        "unbind": lambda w: w.view(2, WIDTH, WIDTH).unbind(0),
        "view": lambda w: (w.view(WIDTH, 2 * WIDTH)[:, ::2], w.reshape(2, WIDTH, WIDTH)[1]),
        "transpose": lambda w: (w[:WIDTH].t(), w[:WIDTH]),
        "normalised": lambda w: [F.normalize(w, dim=0)[:WIDTH]] * 2,
        "alias": lambda w: (w.t().contiguous().t()[:WIDTH], w.view(-1).view(2 * WIDTH, WIDTH)[WIDTH:]),
        "twice": lambda w: [w[:WIDTH]] * 2,
    }

    def build(self):
        self.w = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 3)

    def forward(self, x):
        a, b = self.ways[self.how](self.w)
        return torch.tanh(x @ a) @ b


class ReadsOwnWeight(RowBlock):
    """Calls a layer and reads its weight too."""

    weight = 4
    cuts: ClassVar[dict[str, str]] = {"a": "linear"}

    def build(self):
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.a(x).tanh() @ self.a.weight + self.a.bias


class TwoModulesOneWeight(RowBlock):
    weight = 3
    cuts: ClassVar[dict[str, str]] = {"a": "linear", "b": "linear"}

    def build(self):
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Products(RowBlock):
    """Of its own weight: by einsum, of two small ones, by a Function of its own."""

    weight = 4
    in_16_bits = False
    ways: ClassVar[Any] = {
        "einsum": lambda s, x: torch.einsum("...d,hde->...he", x, s.w).tanh().sum(-2),
        "low rank": lambda s, x: x + torch.tanh(x @ (s.w[0, :, :2] @ s.w[1, :2])),
        "by hand": lambda s, x: functions.OwnLinear.apply(x, s.w[0]).tanh(),
    }

    def build(self):
        self.w = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 3)


class Experts(RowBlock):
    def build(self):
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        made = torch.stack([expert(x) for expert in self.experts], -2)
        return (weights.unsqueeze(-1) * made).sum(-2)


class Recurrent(RowBlock):
    families = ("sequences",)
    weight = 4
    ways: ClassVar[Any] = dict.fromkeys(("LSTM", "GRU", "RNN"), lambda s, x: s.rnn(x)[0])

    def build(self):
        self.rnn = getattr(nn, self.how)(WIDTH, WIDTH, batch_first=True)


def _heads(s, x):
    return (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in s.qkv(x).chunk(3, -1))


def _attended(s, x):
    made = F.scaled_dot_product_attention(*_heads(s, x), is_causal=s.how == "causal")
    return made.transpose(1, 2).flatten(2)


def _by_hand(s, x):
    q, k, v = _heads(s, x)
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
    return ((q @ k.transpose(-2, -1) / 2 + mask).softmax(-1) @ v).transpose(1, 2).flatten(2)


def _encoder(dropout):
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=dropout, batch_first=True)


class Attention(RowBlock):
    families = ("sequences",)
    weight = 5
    ways: ClassVar[Any] = {
        "encoder": lambda s, x: s.inner(x),
        "module": lambda s, x: s.inner(x, x, x, need_weights=False)[0],
        "fused": _attended,
        "causal": _attended,
        "by_hand": _by_hand,
    }

    def build(self):
        if self.how == "encoder":
            self.inner = _encoder(0.0)
        elif self.how == "module":
            self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        else:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)


class EncoderWithDropout(RowBlock):
    families = ("sequences",)
    draws = True

    def build(self):
        self.inner = _encoder(0.2)

    def forward(self, x):
        return self.inner(x)


class BatchNorm(Block):
    families = ("vectors",)
    crosses_rows = True
    weight = 4

    def build(self):
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return torch.tanh(self.norm(self.layer(x)))


class AcrossRows(Block):
    """Rows look at each other."""

    families = ("vectors",)
    crosses_rows = True
    ways: ClassVar[Any] = {
        "attend": lambda h, x: (h @ h.t() / 8).softmax(-1) @ x,
        "centre": lambda h, x: h - h.mean(0),
        "flip": lambda h, x: h + x.flip(0),
    }

    def forward(self, x):
        return self.ways[self.how](self.layer(x), x)
