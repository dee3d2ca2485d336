"""A small GPT and the ways to train it on several ranks that must all give the losses of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from msrun.runtime import AutoParallel, MicroBatchInterleaved, no_init_parameters, optim, shard

WORLD_SIZE = 4
STEPS = 8
BATCH, TOKENS, VOCABULARY, WIDTH, HEADS = 8, 6, 32, 16, 4


class RmsNorm(nn.Module):
    """Root mean square norm of elementary operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


NORMS: dict[str, Callable[[int], nn.Module]] = {"rms": RmsNorm, "layer": nn.LayerNorm}


class Attention(nn.Module):
    def __init__(self, drop: float, is_composed: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)
        self.is_composed = is_composed

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        if self.is_composed:
            mask = torch.ones(TOKENS, TOKENS).triu(1).bool()
            scores = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).masked_fill(mask, float("-inf"))
            y = self.drop(scores.softmax(-1)) @ v
        else:
            p = self.drop.p if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.drop(self.out(y.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self, drop: float, norm: str, is_composed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = NORMS[norm](WIDTH), NORMS[norm](WIDTH)
        self.attention = Attention(drop, is_composed)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Token and position embeddings, pre-norm blocks, output weight tied to the tokens'; returns the loss."""

    def __init__(self, drop: float, norm: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList([Block(drop, norm, is_composed=False), Block(drop, norm, is_composed=True)])
        self.norm = NORMS[norm](WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.drop(self.tokens(text) + self.positions(torch.arange(text.size(1))))
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def _megatron(data: int, model: int) -> dict[str, Any]:
    """Heads, hidden width and vocabulary over `model` ranks, samples over `data` ones."""
    columns, rows = ((data, 1, 1), (model, 1), (model,)), ((data, 1, model), (1, model), (1,))
    strategies: dict[str, Any] = {
        "tokens": ((model, 1), (data, 1)),
        "head": ((data, 1, 1), (model, 1)),
        "loss": ((data, model), (data,)),
    }
    for block in ("blocks.0.", "blocks.1."):
        for name in ("attention.query", "attention.key", "attention.value", "up"):
            strategies[block + name] = columns
        for name in ("attention.out", "down"):
            strategies[block + name] = rows
    return strategies


class Kinds(nn.Module):
    """Every kind of dropout, on values whose rows of the batch stand first, second, or are joined with others."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.2, batch_first=True)
        self.inplace = nn.Dropout(0.1, inplace=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Parameter(torch.ones(4, WIDTH))

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.tokens(text)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = F.dropout1d(x, 0.2) + F.alpha_dropout(x, 0.1, training=True)
        x = F.feature_alpha_dropout(x, 0.3, training=True) + F.dropout(x.transpose(0, 1), 0.4).transpose(0, 1)
        x = F.dropout2d(x.unflatten(-1, (HEADS, -1)), 0.3).flatten(2) + F.dropout(x, training=False)
        x = self.inplace(x.flatten(0, 1) * 2) + F.dropout(x, 0.5)[:, :1].expand_as(x).flatten(0, 1)
        scores = self.head(x) + F.dropout(self.scale, 0.5).mean() + torch.dropout(x, 1.0, train=True).sum()
        return F.cross_entropy(scores, following.flatten())


MIXED = _megatron(2, 2) | {"tokens": ((1, 1), (2, 1)), "head": ((2, 1, 1), (1, 1)), "loss": ((2, 1), (2,))}


@dataclass(frozen=True)
class Scenario:
    """One way."""

    name: str
    strategies: Mapping[str, Any] = field(default_factory=dict)
    drop: float = 0.1
    copies: int = 1
    hsdp: Mapping[str, Any] | None = None
    dataset: Any = "data_parallel"
    deferred: bool = False
    mode: str = "semi_auto"
    norm: str = "rms"
    """Norm of the GPT, or "kinds": the other network."""
    steps: int = 3
    dtype: str = "float64"


SCENARIOS = [
    Scenario("data-parallel", steps=STEPS),
    Scenario("data-parallel-float32", dtype="float32", steps=STEPS),
    Scenario("data-parallel-layer-norm", norm="layer"),
    Scenario("megatron", _megatron(1, 4), dataset="full_batch", steps=STEPS),
    Scenario("megatron-own-batches-two-copies", _megatron(1, 4), copies=2),
    Scenario("mixed", MIXED, steps=STEPS),
    Scenario("mixed-two-copies-hsdp", MIXED, copies=2, hsdp={"threshold": 0}),
    Scenario("mixed-two-copies-batch-cut-in-two", MIXED, copies=2, dataset=((2, 1), (2, 1))),
    Scenario("hsdp-level3-deferred", hsdp={"threshold": 0, "optimizer_level": "level3"}, deferred=True),
    Scenario("without-capture", mode="data_parallel"),
    Scenario("kinds-data-parallel", norm="kinds"),
    Scenario("kinds-two-copies", norm="kinds", copies=2),
]


SAVED_AFTER, RESUMED = 4, Scenario("resumed", hsdp={"threshold": 0}, steps=8)
"""A checkpoint is written after so many steps of the first scenario, and gone on with from there."""


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, VOCABULARY, (steps, BATCH, TOKENS + 1), generator=generator)
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]


def _network(scenario: Scenario) -> nn.Module:
    return Kinds() if scenario.norm == "kinds" else Gpt(scenario.drop, scenario.norm)


def build(scenario: Scenario) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network of a scenario and its optimizer, the same in every process."""
    torch.manual_seed(3)
    torch.set_default_dtype(getattr(torch, scenario.dtype))
    if not scenario.deferred:
        network = _network(scenario)
        return network, optim.Adam(network.parameters(), lr=1e-3)
    with no_init_parameters():
        network = _network(scenario)
        return network, optim.Adam(network.parameters(), lr=1e-3)


def wrap(network: nn.Module, scenario: Scenario) -> AutoParallel:
    """Return what runs the network in the way of the scenario."""
    for path, strategy in scenario.strategies.items():
        shard(network.get_submodule(path), strategy)
    whole = MicroBatchInterleaved(network, scenario.copies) if scenario.copies > 1 else network
    step = AutoParallel(whole, scenario.mode)
    if scenario.mode == "semi_auto":
        step.dataset_strategy(scenario.dataset)
    if scenario.hsdp is not None:
        step.hsdp(**scenario.hsdp)
    return step


def train(
    step: AutoParallel, optimizer: torch.optim.Optimizer, steps: range, take: Callable[[Tensor], Tensor]
) -> list[float]:
    """Return the losses of some steps; `take` gives a rank's part of a batch."""
    losses = []
    for text, following in batches(steps.stop)[steps.start :]:
        loss = step(take(text), take(following))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
