"""Attention whose sequence is cut: by a ring and by an exchange for heads (Ulysses), trained like one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from on_ranks import Ranks, on_ranks
from torch import Tensor, nn

from msrun.runtime import AutoParallel, WithLoss, parallelize
from msrun.runtime.execute.transfers import traffic

WIDTH, HEADS, KEY_HEADS, WORDS = 16, 4, 2, 24


class Attention(nn.Module):
    def __init__(self, kind: str, key_heads: int) -> None:
        super().__init__()
        self.kind, self.key_heads = kind, key_heads
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, key_heads * WIDTH // HEADS) for _ in range(2))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mask = None
        if self.kind == "masked":  # the last word attends to nothing, as where padding stands on the left
            mask = (real[:, None, :] & real[:, :, None])[:, None]
        causal = self.kind == "causal"
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, kind: str, key_heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(kind, key_heads)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), real)
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, kind: str, key_heads: int = KEY_HEADS, layers: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block(kind, key_heads) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x, real = self.embed(tokens), tokens != 0
        for layer in self.layers:
            x = layer(x, real)
        return self.head(x).flatten(0, 1)


def words(rows: int, length: int) -> Tensor:
    tokens = torch.randint(1, WORDS, (rows, length), generator=torch.Generator().manual_seed(4))
    tokens[:, -1] = 0
    return tokens


def cut_by(network: nn.Module, ranks: int) -> AutoParallel:
    """Return the step of a network whose sequences of one row come in as many parts as there are ranks."""
    return AutoParallel(WithLoss(network, nn.CrossEntropyLoss())).dataset_strategy(((1, ranks), (ranks,)))


WAYS = [
    (way, kind, length)
    for way, ranks in (("ring", 4), ("ulysses", 2))
    for kind in ("causal", "plain", "masked")
    for length in (16, 12)
]
"""The parts of 12 words on 4 ranks are odd."""


@on_ranks(2, 4, dtype="float64")
@pytest.mark.parametrize(
    ("way", "kind", "length"),
    slow_but(["ring causal 16", "ring masked 12", "ulysses causal 16"], WAYS, lambda *w: " ".join(map(str, w))),
)
def test_a_sequence_that_is_cut_trains_like_a_whole_one(ranks: Ranks, way: str, kind: str, length: int) -> None:
    """Nothing gathers it: every other layer keeps the cut."""
    torch.manual_seed(3)
    network = parallelize(Decoder(kind, ranks.size if way == "ulysses" else KEY_HEADS), {"layers.*.attention": way})
    step, tokens = cut_by(network, ranks.size), words(1, length)
    part = tokens.chunk(ranks.size, 1)[ranks.rank]
    step.verify(part, part.flatten())
    moved = step.plan.traffic
    assert moved is not None
    assert ("ring" in moved.calls) == (way == "ring")
    if kind != "masked":  # which words are real is read in both ways
        assert set(moved.calls) == {"all_reduce", "ring" if way == "ring" else "all_to_all"}
    text = step.plan.explain()
    assert ("the next keys and values travel while a block is computed" in text) == (way == "ring")
    assert ("causal work balanced" in text) == (way == "ring" and kind == "causal" and (length // ranks.size) % 2 == 0)
    for _ in range(2):
        traffic.reset()
        step(part, part.flatten()).backward()
    assert {name: [moved.calls[name], moved.bytes[name]] for name in moved.calls} == {
        name: [traffic.calls[name], traffic.bytes[name]] for name in traffic.calls
    }
