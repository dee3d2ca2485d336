"""Verifies networks that are cut by named plans, and writes what each rank stores of them.

usage: named_plan.py RESULT.json
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from msrun.runtime import AutoParallel, WithLoss, get_rank, init, parallelize

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


CASES = {
    "words": lambda: parallelize(Whole(nn.Linear), {**INSIDE, "embed": "vocab", "head": "colwise"}),
    "transposed": lambda: parallelize(Whole(Transposed), INSIDE),
    "columns of a table": lambda: parallelize(Whole(nn.Linear), {"model.embed": "colwise"}),
    "half of the ranks": lambda: parallelize(Whole(nn.Linear), INSIDE, tensor_parallel=2),
    "styles of torch": lambda: parallelize(Whole(nn.Linear), STYLES),
    "of the model": lambda: brought(nn.Linear),
}


def main():
    init()
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, make in CASES.items():
        torch.manual_seed(3)
        network = make()
        tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(4))
        step = AutoParallel(WithLoss(network, nn.CrossEntropyLoss())).dataset_strategy("full_batch")
        report = step.verify(tokens, tokens.flatten(), raises=False)
        stored = {item.name.removeprefix("model."): list(item.local_shape) for item in step.plan.parameters}
        found[name] = {"is_equal": report.is_equal, "text": str(report), "stored": stored}
    if get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
