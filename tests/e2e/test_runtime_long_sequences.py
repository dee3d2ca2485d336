"""Attention whose sequence is cut: by a ring and by an exchange for heads (Ulysses), trained like one process."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from on_ranks import Ranks, on_ranks
from torch import Tensor, nn

from msrun.runtime import AutoParallel, WithLoss, parallelize, recompute
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.sharding.layout import build_mesh
from msrun.runtime.sharding.operators.ring_attention import ring_attention
from msrun.runtime.simulate.recording import Recording

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


@on_ranks(4, dtype="float64")
@pytest.mark.parametrize("way", slow_but(["ulysses"], ["ring", "ulysses"]))
def test_heads_are_cut_beside_the_sequence(way: str) -> None:
    torch.manual_seed(3)
    inside = {"layers.*.attention.[qkv]": "colwise", "layers.*.attention.out": "rowwise"}
    network = parallelize(Decoder("causal", 4), {"layers.*.attention": way, **inside}, tensor_parallel=2)
    tokens = words(1, 16)
    step = AutoParallel(WithLoss(network, nn.CrossEntropyLoss())).dataset_strategy("full_batch")
    step.verify(tokens, tokens.flatten())
    cuts = {each.strategy[0] for each in step.plan.operators if "attention" in each.operator}
    assert cuts == {(1, 2, 2, 1)}


@on_ranks(4, dtype="float64")
def test_a_ring_that_is_recomputed_sends_its_keys_and_values_again(ranks: Ranks) -> None:
    network = parallelize(Decoder("causal"), {"layers.*.attention": "ring"})
    recompute(network.layers[0])
    step, part = cut_by(network, ranks.size), words(1, 16).chunk(ranks.size, 1)[ranks.rank]
    step.verify(part, part.flatten())
    for _ in range(2):
        traffic.reset()
        step(part, part.flatten()).backward()
    assert step.plan.traffic is not None
    assert (traffic.calls["ring"], traffic.bytes["ring"]) == (3, step.plan.traffic.bytes["ring"])


@on_ranks(pytest.param(2, marks=pytest.mark.slow), 4, dtype="float32")
@pytest.mark.parametrize(
    ("heads", "key_heads", "causal"),
    slow_but(
        ["4 4 True"], [(h, k, c) for h, k in ((4, 4), (8, 2)) for c in (True, False)], lambda *w: " ".join(map(str, w))
    ),
)
def test_memory_grows_as_the_formula_says(ranks: Ranks, heads: int, key_heads: int, causal: bool) -> None:
    """With Q of a rank's part of the queries and C of its keys and values: 2 Q + C and one sum a row are kept; at the
    peak of the backward pass it is 3 Q, or 4 if causal, and 9 C, or 7 of two ranks."""
    mesh, found = build_mesh(ranks.size), []
    for length in (128, 256):
        shape = (1, heads, length, 32)
        query, keys_values = torch.randn(shape).requires_grad_(), torch.randn(1, key_heads, length, 64).requires_grad_()
        gradient = torch.randn(shape)
        record = Recording(PROFILES["h100"], (query, keys_values, gradient))
        place = {"mesh_shape": mesh.shape, "first_rank": 0, "axes": mesh.axes}
        words = {"width": 32, "is_causal": causal, "is_balanced": causal, "scale": None, **place}
        with record.recording():
            result = ring_attention(keys_values.clone(), query.clone(), None, torch.tensor(ranks.rank), **words)
            kept = record.memory.now
            result.backward(gradient)
        found.append((kept, record.memory.peak))
    of_queries, of_keys_values, of_sums = 4 * 128 * heads * 32, 4 * 128 * key_heads * 64, 4 * 128 * heads
    kept, peak = (after - before for before, after in zip(*found, strict=True))
    assert kept == 2 * of_queries + of_keys_values + of_sums
    assert peak == pytest.approx((3 + causal) * of_queries + (9 if ranks.size > 2 else 7) * of_keys_values, rel=0.15)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@on_ranks(4, dtype="float64")
@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_llama_with_its_sequence_over_four_ranks_trains_like_the_whole_model(ranks: Ranks, way: str) -> None:
    from zoo.language import LlamaConfig, LlamaForCausalLM, Loss  # makes torchvision importable

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4 if way == "ulysses" else 2)
    model = LlamaForCausalLM(config)
    alone, network = Loss(copy.deepcopy(model)), Loss(parallelize(model, {"layers.*.self_attn": way}))
    step = AutoParallel(network).dataset_strategy(((1, ranks.size),) * 2)
    optimizer, beside = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (network, alone))
    for number in range(5):
        tokens = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(number))
        part = tokens.chunk(ranks.size, 1)[ranks.rank]
        loss, right = step(part, part.clone()), alone(tokens, tokens.clone())
        loss.backward()
        right.backward()
        torch.testing.assert_close(loss.detach(), right.detach(), rtol=1e-6, atol=1e-6)  # its norms are in float32
        for each in (optimizer, beside):
            each.step()
            each.zero_grad()
