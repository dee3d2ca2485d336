"""Networks of which parts run on the host, each with its loss and its batch."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

ROWS, CLASSES = 8, 4


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.third(torch.tanh(self.second(x)))


class ConvNet(nn.Module):
    """With statistics that the forward pass writes. A bias before them would have a gradient of rounding alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.pool, self.head = nn.AvgPool2d(2), nn.Linear(4 * 2 * 2, CLASSES)

    def forward(self, x):
        x = self.pool(F.silu(self.norm(self.conv(x.unflatten(1, (2, 2, 2)).repeat(1, 1, 2, 2)))))
        return self.head(x.flatten(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """With an embedding that the last layer shares."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.letters = nn.Embedding(16, 8)
        self.attention, self.norm = Attention(), nn.LayerNorm(8)
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(drop)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, x):
        x = self.letters((x * 5).long().abs() % 16)
        x = x + self.attention(self.norm(x))
        x = x + self.drop(self.down(F.gelu(self.up(x))))
        return self.head(x).mean(1)[:, :CLASSES]


NETWORKS = {"mlp": Mlp, "conv": ConvNet, "transformer": Transformer, "dropping": lambda: Transformer(0.25)}


def new_network(name, seed=0):
    """Return a network of float64 weights, the same for every call."""
    torch.manual_seed(seed)
    return NETWORKS[name]().double()


def new_batch(step):
    """Return inputs (ROWS, 8) and labels (ROWS,)."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 8, generator=draw).double(), torch.randint(CLASSES, (ROWS,), generator=draw)
