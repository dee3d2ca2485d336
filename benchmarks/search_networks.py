"""Networks whose strategies `search.py` searches."""

from __future__ import annotations

import sys
from pathlib import Path

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


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        width = after // 4
        self.reduce, self.spread = _convolution(before, width, 1), _convolution(width, width, 3, stride)
        self.expand = _convolution(width, after, 1)
        is_same = stride == 1 and before == after
        self.shortcut = nn.Identity() if is_same else _convolution(before, after, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, before, height, width) -> (batch, after, height / stride, width / stride)."""
        inner = self.expand(torch.relu(self.spread(torch.relu(self.reduce(images)))))
        return torch.relu(inner + self.shortcut(images))


def _convolution(before: int, after: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution with its batch norm."""
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))


class ResNet50(nn.Module):
    """He et al. 2015, table 1, with its loss."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.first = _convolution(3, 64, 7, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks, before = [], 64
        for group, count in enumerate((3, 4, 6, 3)):
            after = 256 << group
            for number in range(count):
                blocks.append(Bottleneck(before, after, 2 if group and not number else 1))
                before = after
        self.blocks, self.last = nn.ModuleList(blocks), nn.Linear(before, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(batch, 3, height, width), (batch) -> the loss."""
        x = self.pool(torch.relu(self.first(images)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.last(x.mean((2, 3))), labels)


class Mixtral(nn.Module):
    """A small Mixtral of transformers with the loss that it computes."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        from zoo.packages import prepare_torchvision

        prepare_torchvision()
        from transformers import MixtralConfig, MixtralForCausalLM

        self.model = MixtralForCausalLM(MixtralConfig(**sizes, experts_implementation="batched_mm"))

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        """(batch, length) twice -> the loss."""
        loss: Tensor = self.model(input_ids=text, labels=labels, use_cache=False).loss
        return loss
