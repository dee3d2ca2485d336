"""Experts that the ranks share out: tokens travel to them and back, and train them like one process."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from on_ranks import Ranks, on_ranks
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, WithLoss, expert_load, parallelize

WIDTH, EXPERTS, CHOICES, WORDS = 8, 4, 2, 16


class Experts(nn.Module):
    """In the form of transformers' models, as a loop over values that no graph holds."""

    def __init__(self, *, bias: bool, turned: bool) -> None:
        super().__init__()
        self.is_transposed = turned
        up, down = (WIDTH, 24) if turned else (24, WIDTH), (12, WIDTH) if turned else (WIDTH, 12)
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, *up) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, *down) / 3)
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 24) / 3)
            self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 3)
        self.act_fn = nn.SiLU()

    def forward(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            rows, places = torch.where(chosen == expert)
            if not len(rows):
                continue
            up, down = self.gate_up_proj[expert], self.down_proj[expert]
            biases = [getattr(self, f"{name}_bias", [None] * EXPERTS)[expert] for name in ("gate_up_proj", "down_proj")]
            gate, value = F.linear(tokens[rows], up.T if self.is_transposed else up, biases[0]).chunk(2, -1)
            made = F.linear(self.act_fn(gate) * value, down.T if self.is_transposed else down, biases[1])
            found = found.index_add(0, rows, made * shares[rows, places, None])
        return found


class Mixture(nn.Module):
    def __init__(self, *, favour: float = 0.0, bias: bool = False, turned: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts(bias=bias, turned=turned)
        with torch.no_grad():
            self.gate.bias[1] += favour

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).flatten(0, 1)
        shares, chosen = self.gate(x).softmax(-1).topk(CHOICES, dim=-1)
        return self.head(x + self.experts(x, chosen, shares / shares.sum(-1, keepdim=True)))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (rows, 6), generator=torch.Generator().manual_seed(5))
    return words, words.roll(1, 1).flatten()


CASES = {
    "plain": ({}, 4),
    "biases, weights the other way round": ({"bias": True, "turned": True}, 4),
    "one expert has all": ({"favour": 50.0}, 4),
    "none for two experts": ({"favour": -1e4}, 8),
    "the same tokens on all ranks": ({}, 3),
}
"""Name -> what the network is, and rows of the batch; 3 rows cannot be shared out."""


@on_ranks(2, 4, dtype="float64")
@pytest.mark.parametrize("name", slow_but(["one expert has all", "the same tokens on all ranks"], CASES))
def test_experts_that_are_shared_out_train_like_whole_ones(ranks: Ranks, name: str) -> None:
    settings, rows = CASES[name]
    torch.manual_seed(3)
    network = Mixture(**settings)
    alone = copy.deepcopy(network)
    words, labels = batch(rows)
    step = AutoParallel(WithLoss(parallelize(network, {"experts": "expert"}), nn.CrossEntropyLoss()))
    step = step.dataset_strategy("full_batch")
    optimizer, beside = (torch.optim.Adam(each.parameters(), 0.05) for each in (network, alone))
    for _ in range(4):  # the last loss tells of the updates before it
        loss, right = step(words, labels), nn.CrossEntropyLoss()(alone(words), labels)
        loss.backward()
        right.backward()
        torch.testing.assert_close(loss.detach(), right.detach(), rtol=1e-10, atol=1e-10)
        for each in (optimizer, beside):
            each.step()
            each.zero_grad()
    shapes = {item.name: list(item.local_shape) for item in step.plan.parameters}
    assert shapes["experts.down_proj"][0] == EXPERTS // ranks.size


@on_ranks(2, dtype="float64")
def test_the_load_of_every_expert_is_counted(ranks: Ranks) -> None:
    network = parallelize(Mixture(favour=50.0), {"experts": "expert"})
    words, labels = batch(4)
    part = words.chunk(ranks.size)[ranks.rank]
    step = AutoParallel(WithLoss(network, nn.CrossEntropyLoss()))
    step(part, labels.chunk(ranks.size)[ranks.rank]).backward()
    (load,) = expert_load(network).values()
    assert (load[1], sum(load)) == (24, 24 * CHOICES)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(4, 4), "Linear has no weights of experts to be shared out: a gate_up_proj"),
        (nn.Module(), "Module has no weights of experts"),
    ],
)
def test_what_are_no_experts_is_refused(module: nn.Module, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        parallelize(nn.ModuleDict({"mlp": module}), {"mlp": "expert"})


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@on_ranks(4, dtype="float64")
@pytest.mark.parametrize("form", ["eager", "batched_mm"])
def test_mixtral_with_its_experts_over_four_ranks_is_the_whole_model(ranks: Ranks, form: str) -> None:
    from zoo.language import Loss, MixtralConfig, MixtralForCausalLM  # makes torchvision importable

    torch.manual_seed(0)
    words = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8}
    model = MixtralForCausalLM(MixtralConfig(**words, **heads, experts_implementation=form))
    alone, network = Loss(copy.deepcopy(model)), Loss(parallelize(model, {"layers.*.mlp.experts": "expert"}))
    step = AutoParallel(network)
    optimizer, beside = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (network, alone))
    for number in range(5):
        tokens = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(number))
        part = tokens.chunk(ranks.size)[ranks.rank]
        loss, right = step(part, part.clone()), alone(tokens, tokens.clone())
        loss.backward()
        right.backward()
        torch.testing.assert_close(loss.detach(), right.detach(), rtol=1e-7, atol=1e-7)  # its router is in float32
        for each in (optimizer, beside):
            each.step()
            each.zero_grad()
    assert {name.rpartition(".")[2]: sum(load) for name, load in expert_load(network).items()} == {"experts": 192}
