"""A small GPT with dropout, and how it is cut."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

BATCH, TOKENS, VOCABULARY, WIDTH, HEADS = 8, 6, 32, 16, 4


class Attention(nn.Module):
    def __init__(self, drop, is_composed):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)
        self.is_composed = is_composed

    def forward(self, x):
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
    def __init__(self, drop, is_composed):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(drop, is_composed)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Token and position embeddings, pre-norm blocks, output weight tied to the tokens'; returns the loss."""

    def __init__(self, drop, _norm="layer"):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList([Block(drop, is_composed=False), Block(drop, is_composed=True)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, text, following):
        x = self.drop(self.tokens(text) + self.positions(torch.arange(text.size(1))))
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def _megatron(data, model):
    """Heads, hidden width and vocabulary over `model` ranks, samples over `data` ones."""
    columns, rows = ((data, 1, 1), (model, 1), (model,)), ((data, 1, model), (1, model), (1,))
    strategies = {
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
