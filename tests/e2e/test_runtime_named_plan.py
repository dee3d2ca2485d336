"""`parallelize`: plans by name, of a user, of torch's styles and of a model; trained like one process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, WithLoss, parallelize

WIDTH, HEADS, WORDS, LENGTH, ROWS = 16, 4, 24, 6, 8


class Transposed(nn.Module):
    """A linear layer with its weight the other way round, as GPT-2's."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.bias = nn.Parameter(torch.randn(outputs) / 4)

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (layer(WIDTH, WIDTH) for _ in range(3))
        self.out = layer(WIDTH, WIDTH)
        self.up, self.down = layer(WIDTH, 4 * WIDTH), layer(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (each(h).view(*h.shape[:2], HEADS, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(layer) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


class Whole(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.model = Decoder(layer)

    def forward(self, tokens):
        return self.model(tokens)


INSIDE = {"layers.*.[qkv]": "colwise", "layers.*.out": "rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
STYLES = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel(), "layers.*.norm": SequenceParallel()}


def brought(layer):
    network = Whole(layer)
    network.tp_plan = {**INSIDE, "layers.*.gate": "colwise", "head": "colwise_rep"}
    return parallelize(network)


BLOCK = ("q", "k", "v", "out", "up", "down")
QUARTERS = {"q": [4, 16], "k": [4, 16], "v": [4, 16], "out": [16, 4], "up": [16, 16], "down": [16, 16]}
WHOLE = {"q": [16, 16], "k": [16, 16], "v": [16, 16], "out": [16, 16], "up": [64, 16], "down": [16, 64]}
HALVES = {"q": [8, 16], "k": [8, 16], "v": [8, 16], "out": [16, 8], "up": [32, 16], "down": [16, 32]}
TURNED = {name: shape[::-1] for name, shape in QUARTERS.items()}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, list[int]], dict[str, list[int]]]] = {
    "words": (
        lambda: parallelize(Whole(nn.Linear), {**INSIDE, "embed": "vocab", "head": "colwise"}),
        QUARTERS,
        {"embed": [6, 16], "head": [6, 16]},
    ),
    "transposed": (lambda: parallelize(Whole(Transposed), INSIDE), TURNED, {}),
    "columns of a table": (
        lambda: parallelize(Whole(nn.Linear), {"model.embed": "colwise"}),
        WHOLE,
        {"embed": [24, 4]},
    ),
    "half of the ranks": (lambda: parallelize(Whole(nn.Linear), INSIDE, tensor_parallel=2), HALVES, {}),
    "styles of torch": (
        lambda: parallelize(Whole(nn.Linear), STYLES),
        {**WHOLE, "up": [16, 16], "down": [16, 16]},
        {},
    ),
    "of the model": (lambda: brought(nn.Linear), QUARTERS, {"head": [6, 16]}),
}
"""Name -> network, what each rank stores of the weights of a block, and of the others where it is not all."""


@on_ranks(4, dtype="float64")
@pytest.mark.parametrize("name", slow_but(["columns of a table", "of the model"], CASES))
def test_a_named_plan_trains_like_one_process_and_cuts_what_it_names(name: str) -> None:
    make, of_blocks, others = CASES[name]
    torch.manual_seed(3)
    step = AutoParallel(WithLoss(make(), nn.CrossEntropyLoss())).dataset_strategy("full_batch")
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(4))
    step.verify(tokens, tokens.flatten())
    stored = {item.name.removeprefix("model."): list(item.local_shape) for item in step.plan.parameters}
    for layer in (0, 1):
        assert {key: stored[f"layers.{layer}.{key}.weight"] for key in BLOCK} == of_blocks
    for key in ("embed", "head"):
        assert stored[f"{key}.weight"] == others.get(key, [24, 16])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"upp": "colwise"}, r"plan 'upp': no module has that name \(did you mean up\?\); the network's are up, norm"),
        ({"up": "columnwise"}, r"plan 'up': 'columnwise' is no word of a plan \(did you mean colwise\?\); they are"),
        ({"norm": "colwise"}, r"plan 'norm': norm \(LayerNorm\) has no weight of two dimensions to be cut colwise"),
        ({"up": nn.ReLU()}, r"plan 'up': 'ReLU' is no word of a plan; they are ColwiseParallel"),
        (None, r"parallelize\(Small\): it brings no tp_plan; give one, e.g."),
    ],
)
def test_a_plan_that_cannot_be_right_is_refused_before_anything_runs(plan: Any, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        parallelize(Small(), plan)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"parallelize\(int\): a torch module is expected"):
        parallelize(3, {})  # type: ignore[type-var]
