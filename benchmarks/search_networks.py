"""Networks whose strategies `search.py` searches."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Norm(nn.Module):
    """Root mean square norm of elementary operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """(.., width) -> the same."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """Attention of elementary operators with rotated positions, and a gated feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)
        self.norm1, self.norm2 = Norm(width), Norm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, heads, length, head width) -> the same."""
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin


class Transformer(nn.Module):
    """A decoder with its loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.angles = 1e4 ** -torch.arange(0, width // heads, 2).div(width // heads)
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        """(batch, length) twice -> the loss."""
        x = self.tokens(text)
        angles = torch.arange(text.shape[1], device=text.device).outer(self.angles.to(text.device)).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


class Perceptron(nn.Module):
    """Wide layers in pairs."""

    def __init__(self, width: int, hidden: int, pairs: int) -> None:
        super().__init__()
        sizes = [(width, hidden), (hidden, width)] * pairs
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.last = nn.Linear(width, 16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """(batch, width), (batch) -> the loss."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.cross_entropy(self.last(x), labels)


class Convolutions(nn.Module):
    """Convolutions with batch norm, and a wide layer to the classes."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))
            for before, after in itertools.pairwise(widths)
        )
        self.wide, self.last = nn.Linear(64 * 4 * 4, 1024), nn.Linear(1024, 16)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(batch, 3, 32, 32), (batch) -> the loss."""
        for layer in self.layers:
            images = layer(images)
        return F.cross_entropy(self.last(torch.relu(self.wide(images.flatten(1)))), labels)
