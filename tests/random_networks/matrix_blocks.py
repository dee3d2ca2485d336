"""Blocks of vectors and sequences: linear layers, weights read in pieces, attention, recurrence, norms."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from random_networks import functions
from random_networks.blocks import Block
from random_networks.case import WIDTH

ROWS = ("vectors", "sequences")


class Linear(Block):
    families = ROWS
    weight = 4
    cuts: ClassVar[dict[str, str]] = {"lin": "linear"}

    def __init__(self, family: str, bias: bool) -> None:
        super().__init__(family)
        self.lin = nn.Linear(WIDTH, WIDTH, bias=bias)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"bias": rng.random() < 0.7}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.written("lin", self.lin(x)))


class Mlp(Block):
    families = ROWS
    weight = 4
    cuts: ClassVar[dict[str, str]] = {"up": "linear", "down": "linear"}

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.written("down", self.down(F.gelu(self.written("up", self.up(x)))))


class Norm(Block):
    families = ROWS
    weight = 3
    cuts: ClassVar[dict[str, str]] = {"norm": "layer_norm"}

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.written("norm", self.norm(x))


class RmsNorm(Block):
    families = ROWS

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


class Fused(Block):
    """One layer whose result is taken apart."""

    families = ROWS
    weight = 6
    cuts: ClassVar[dict[str, str]] = {"lin": "linear"}

    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        self.lin = nn.Linear(WIDTH, 3 * WIDTH)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(["chunk", "split", "unbind", "uneven", "late"])}

    def forward(self, x: Tensor) -> Tensor:
        h = self.written("lin", self.lin(x))
        if self.how == "chunk":
            a, b, c = h.chunk(3, -1)
        elif self.how == "split":
            a, b, c = h.split(WIDTH, -1)
        elif self.how == "unbind":
            a, b, c = h.unflatten(-1, (3, WIDTH)).unbind(-2)
        elif self.how == "uneven":
            a, rest = torch.split(h, [WIDTH, 2 * WIDTH], -1)
            b, c = rest.chunk(2, -1)
        else:
            parts = h.chunk(3, -1)
            x = torch.tanh(x) * torch.sigmoid(parts[0])
            for part in parts[1:]:
                x = torch.tanh(x * 0.5 + part)
            return x
        return torch.tanh(a) * torch.sigmoid(b) + c


class WeightViews(Block):
    """Reads its weight in pieces."""

    families = ROWS
    weight = 6

    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        rows = WIDTH if how in ("transpose", "twice", "alias", "normalised") else 2 * WIDTH
        self.w = nn.Parameter(torch.randn(rows, WIDTH) / 3)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        ways = ["chunk", "slice", "transpose", "split", "unbind", "view", "twice", "normalised", "alias", "linear"]
        return {"how": rng.choice(ways)}

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "chunk":
            a, b = self.w.chunk(2)
        elif self.how == "slice":
            a, b = self.w[:WIDTH], self.w[WIDTH:]
        elif self.how == "split":
            a, b = self.w.split(WIDTH)
        elif self.how == "unbind":
            a, b = self.w.view(2, WIDTH, WIDTH).unbind(0)
        elif self.how == "view":
            a, b = self.w.view(WIDTH, 2 * WIDTH)[:, ::2], self.w.reshape(2, WIDTH, WIDTH)[1]
        elif self.how == "transpose":
            a, b = self.w.t(), self.w
        elif self.how == "normalised":
            a = b = F.normalize(self.w, dim=0)
        elif self.how == "linear":
            return F.linear(F.linear(x, self.w).tanh(), self.w.t())
        elif self.how == "alias":
            alias = self.w.t().contiguous().t()
            return torch.tanh(x @ self.w) @ alias + x @ self.w.view(-1).view(WIDTH, WIDTH)
        else:
            a = b = self.w
        return torch.tanh(x @ a) @ b


class ReadsOwnWeight(Block):
    """Calls a layer and reads its weight too."""

    families = ROWS
    weight = 4
    cuts: ClassVar[dict[str, str]] = {"a": "linear"}

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).tanh() @ self.a.weight + self.a.bias


class TwoModulesOneWeight(Block):
    families = ROWS
    weight = 3
    cuts: ClassVar[dict[str, str]] = {"a": "linear", "b": "linear"}

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Einsum(Block):
    families = ROWS

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.w = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...d,hde->...he", x, self.w).tanh().sum(-2)


class LowRank(Block):
    families = ROWS

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.u, self.v = nn.Parameter(torch.randn(WIDTH, 2) / 2), nn.Parameter(torch.randn(2, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ (self.u @ self.v))


class HandWrittenLinear(Block):
    in_16_bits = False
    families = ROWS
    weight = 3

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return functions.OwnLinear.apply(x, self.w).tanh()


class Experts(Block):
    families = ROWS

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        made = torch.stack([expert(x) for expert in self.experts], -2)
        return (weights.unsqueeze(-1) * made).sum(-2)


class Recurrent(Block):
    families = ("sequences",)
    weight = 4

    def __init__(self, family: str, kind: str) -> None:
        super().__init__(family)
        self.rnn = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"kind": rng.choice(["LSTM", "GRU", "RNN"])}

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Attention(Block):
    families = ("sequences",)
    weight = 5

    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        if how == "encoder":
            self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        elif how == "module":
            self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        else:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(["encoder", "module", "fused", "causal", "by_hand"])}

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "encoder":
            return self.inner(x)
        if self.how == "module":
            return self.inner(x, x, x, need_weights=False)[0]
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.how == "by_hand":
            mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
            made = (q @ k.transpose(-2, -1) / 2 + mask).softmax(-1) @ v
        else:
            made = F.scaled_dot_product_attention(q, k, v, is_causal=self.how == "causal")
        return made.transpose(1, 2).flatten(2)


class EncoderWithDropout(Block):
    families = ("sequences",)
    draws = True

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class BatchNorm(Block):
    families = ("vectors",)
    crosses_rows = True
    weight = 4

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.lin(x)))


class AcrossRows(Block):
    """Rows look at each other."""

    families = ("vectors",)
    crosses_rows = True

    def __init__(self, family: str, how: str) -> None:
        super().__init__(family)
        self.how = how
        self.lin = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def options(rng: random.Random) -> dict[str, Any]:
        return {"how": rng.choice(["attend", "centre", "flip"])}

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if self.how == "attend":
            return (h @ h.t() / 8).softmax(-1) @ x
        return h - h.mean(0) if self.how == "centre" else h + x.flip(0)
