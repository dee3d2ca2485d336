"""Networks, data and optimizers that `parallel_job.py` trains: each built anew, with equal values, for every way."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

CLASSES = 10


class Perceptron(nn.Module):
    """`depth` linear layers of one width with ReLU between, and a last one to the classes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, classes)."""
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.last(x)


class FeedForward(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> the same."""
        return x + self.down(F.relu(self.up(x)))


class Residual(nn.Module):
    """`depth` feed-forward blocks and a last layer to the classes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(width) for _ in range(depth))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, classes)."""
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Attend(nn.Module):
    """Scaled dot-product attention of heads, written out: DTensor has no strategy for the fused one on the CPU."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(batch, heads, sequence, head width) three times -> the same."""
        scores = torch.matmul(query, key.transpose(-2, -1)) * query.shape[-1] ** -0.5
        return torch.matmul(torch.softmax(scores, -1), value)


class Add(nn.Module):
    """A residual connection: a module, so that it can have a strategy."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Two tensors of one shape -> their sum."""
        return x + y


class Block(nn.Module):
    """A transformer block: attention and feed-forward, each behind a layer norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.attend = Attend()
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.add1 = Add()
        self.add2 = Add()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same. On local tensors the number of heads is what the weights have."""
        y = self.norm1(x)
        attended = self.attend(self._heads(self.query(y)), self._heads(self.key(y)), self._heads(self.value(y)))
        x = self.add1(x, self.out(attended.transpose(1, 2).flatten(2)))
        return self.add2(x, self.down(F.gelu(self.up(self.norm2(x)))))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_width).transpose(1, 2)


class Transformer(nn.Module):
    """`depth` blocks."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same."""
        for block in self.blocks:
            x = block(x)
        return x


def parts_of(build: type[nn.Module], *sizes: int) -> nn.Module:
    """Return a network whose values depend on its sizes only."""
    torch.manual_seed(1)
    return build(*sizes)


def classification(batch: int, width: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return this rank's own samples, (batch, width), and their classes."""
    generator = torch.Generator().manual_seed(2 + rank)
    return (
        torch.randn(batch, width, generator=generator),
        torch.randint(0, CLASSES, (batch,), generator=generator),
    )


def regression(batch: int, sequence: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the samples of all ranks and their targets, (batch, sequence, width) both."""
    generator = torch.Generator().manual_seed(2)
    shape = (batch, sequence, width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
