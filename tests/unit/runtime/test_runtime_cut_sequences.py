"""Attention with a cut sequence: what it keeps, what a search makes of it, and which words do not go."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import parallelize
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.price import Price, StepSpec, price
from msrun.runtime.search.search import SearchSpec, search
from msrun.runtime.sharding.layout import TensorLayout, build_mesh
from msrun.runtime.sharding.operators.rule import LabelSplit

WIDTH = 8
"""Of a head."""
MESH = build_mesh(4)
H100 = PROFILES["h100"]


class Attention(nn.Module):
    def __init__(self, heads: int, key_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(64, heads * WIDTH), nn.Linear(heads * WIDTH, 64)
        self.k, self.v = (nn.Linear(64, key_heads * WIDTH) for _ in range(2))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


def captured(network: nn.Module, length: int) -> CapturedGraph:
    shape, given = (1, length, 64), strategies_of(network)
    target, values = find_target(network), [torch.ones(shape)]
    return capture(target, values, {}, input_shapes=[shape], parameter_shapes={}, strategies=given)


def constraints(splits: dict[str, LabelSplit] | None = None) -> Constraints:
    return Constraints([TensorLayout(((), MESH.axes, ()))], splits=splits or {})


def attention_of(graph: CapturedGraph) -> str:
    return next(node.name for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))


def price_of(graph: CapturedGraph, way: str) -> Price:
    decisions = decide(graph, MESH, constraints({attention_of(graph): {way: MESH.axes}}))
    return price(graph, decisions, H100, StepSpec())


@pytest.mark.parametrize("length", [512, 2048, 8192])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2)])
def test_a_ring_keeps_its_part_of_keys_values_results_and_sums(heads: int, key_heads: int, length: int) -> None:
    """Queries are counted where they are made."""
    graph = captured(Attention(heads, key_heads), length)
    rows = length // MESH.size
    numbers = rows * (heads * WIDTH + 2 * key_heads * WIDTH + heads)
    assert price_of(graph, "ring").activations[attention_of(graph)] == 4 * numbers


def test_both_ways_are_priced_by_what_they_send() -> None:
    graph = captured(Attention(8, 8), 4096)
    ring, ulysses = (price_of(graph, way).traffic for way in ("ring", "ulysses"))
    part = 4 * 4096 // MESH.size * 8 * WIDTH
    assert ulysses.bytes["all_to_all"] == 8 * part  # q, k, v and the result, and their gradients
    balancing, sums = 4 * part, 4 * 4096 // MESH.size * 8
    assert ring.bytes["ring"] == 2 * balancing + sums + 2 * part * (3 + 3 + 4)  # keys and values twice, gradients home


@pytest.mark.parametrize(("heads", "way"), [(4, "ulysses"), (6, "ring")])
def test_a_search_cuts_a_sequence_that_is_too_long(heads: int, way: str) -> None:
    """Where heads cannot be shared out it is the ring."""
    graph = captured(Attention(heads, 2 if way == "ring" else heads), 65536)
    found = search(graph, MESH, constraints(), SearchSpec("exact", H100), lambda _, *, shards_all: StepSpec())
    split = found.plan.splits[attention_of(graph)]
    assert set(split) <= {"ring"} if way == "ring" else set(split) <= {"ulysses", "b1"}
    assert split


@pytest.mark.parametrize(
    ("network", "word", "words"),
    [
        (
            Attention(6, 6),
            "ulysses",
            r"ulysses cuts a size of 64 and 6 heads to exchange into 4; .* is 2, or use",
        ),
        (Attention(4, 4, dropout=0.1), "ring", r"ring is for self attention \(as many queries as keys, no drop"),
        (
            nn.Sequential(nn.Linear(64, 64)),
            "ring",
            r"0 is to attend by ring, but it calls scaled_dot_.* 0 times",
        ),
        (Attention(4, 4), "rings", r"'rings' is no word of a plan \(did you mean ring\?\)"),
    ],
)
def test_what_does_not_go_is_refused_by_name(network: nn.Module, word: str, words: str) -> None:
    whole = nn.Sequential(network)
    with pytest.raises(StrategyError, match=words):
        decide(captured(parallelize(whole, {"0": word}), 64), MESH, constraints())
