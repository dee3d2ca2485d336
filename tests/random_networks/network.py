"""The network of a case, with its loss, and the batches it is trained on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import random_networks.image_blocks
import random_networks.matrix_blocks  # noqa: F401  # both register their blocks
from random_networks.blocks import BLOCKS, features
from random_networks.case import CHANNELS, CLASSES, SIDE, TOKENS, WIDTH, WORDS, Case


class Network(nn.Module):
    """Blocks one after the other, between an embedding (of words) and a head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.family = case.family
        self.wires = [piece.wire for piece in case.pieces]
        self.embed = nn.Embedding(WORDS, WIDTH) if case.from_words else None
        self.blocks = nn.ModuleList(BLOCKS[piece.kind](case.family, **piece.options) for piece in case.pieces)
        self.head = nn.Linear(features(case.family), WORDS if case.has_tied_head else CLASSES)
        if case.has_tied_head and self.embed is not None:
            self.head.weight = self.embed.weight
        self.unread = nn.Linear(CLASSES, 2) if case.returns == "unread" else None
        self.dead = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (B, classes), of sequences (B, TOKENS, classes)."""
        h = x if self.embed is None else self.embed(x)
        first = None
        for wire, block in zip(self.wires, self.blocks, strict=True):
            made = block(h)
            if wire == "residual":
                made = h + made
            elif wire == "skip" and first is not None:
                made = made + 0.5 * first
            elif wire == "twice":
                made = block(made)
            h = made
            first = h if first is None else first
        if self.family == "images":
            h = h.mean((2, 3))
        return self.head(h)


class Training(nn.Module):
    """The network with its loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.network = Network(case)
        self.loss, self.returns = case.loss, case.returns

    def forward(self, x: Tensor, y: Tensor, factor: Any = 1.0) -> Tensor | tuple[Tensor, Tensor] | dict[str, Tensor]:
        """Return the loss, or a tuple or dict that begins with it.

        Args:
            factor: of the loss: a number, an object that holds one as `value`, or True, which means 2.
        """
        if not isinstance(factor, float | int):
            factor = factor.value
        elif factor is True:
            factor = 2.0
        scores = self.network(x)
        if self.loss == "cross_entropy":
            loss = F.cross_entropy(scores.flatten(0, -2), y.flatten())
        elif self.loss == "penalty":
            loss = F.mse_loss(scores, y) + 1e-2 * self.network.head.weight.square().sum()
        elif self.loss == "by_hand":
            loss = (scores - y).abs().pow(1.5).mean() + 0.1 * scores.logsumexp(-1).mean()
        else:
            loss = F.mse_loss(scores, y)
        loss = loss * factor
        if self.returns == "loss":
            return loss
        if self.returns == "dict":
            return {"loss": loss, "scores": scores}
        return loss, scores if self.network.unread is None else self.network.unread(scores)


def make_training(case: Case) -> Training:
    """Return the network with equal weights in every process."""
    torch.manual_seed(case.seed)
    return Training(case)


def make_batches(case: Case, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return the global batch of every step."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    shapes = {"vectors": (WIDTH,), "sequences": (TOKENS, WIDTH), "images": (CHANNELS, SIDE, SIDE)}
    classes = WORDS if case.has_tied_head else CLASSES
    lead = (TOKENS,) if case.family == "sequences" else ()
    found = []
    for _ in range(case.steps):
        x = torch.randn(case.rows, *shapes[case.family], generator=generator, dtype=torch.float64).to(dtype)
        y = torch.randn(case.rows, *lead, classes, generator=generator, dtype=torch.float64).to(dtype)
        if case.from_words:
            x = torch.randint(0, WORDS, (case.rows, TOKENS), generator=generator)
        if case.loss == "cross_entropy":
            y = torch.randint(0, classes, (case.rows, *lead), generator=generator)
        found.append((x, y))
    return found
