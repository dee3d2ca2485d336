"""A small GPT on four dimensions at once: pipeline x data x tensor x optimizer parallel, with recomputed blocks.

Start with `bash run.sh [TEXT]`. TEXT is any text file; without it the program learns its own letters. 8 ranks are
2 stages of 4 ranks, and these 2 parts of the batch by 2 parts of every block. One process gives the same losses:
`python train.py`.
"""

import os
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import (
    AutoParallel,
    Pipeline,
    WithLoss,
    get_group_size,
    get_rank,
    init,
    no_init_parameters,
    recompute,
    release,
    shard,
)

init()
torch.manual_seed(1)
RANKS = get_group_size()
STAGES = 2 if RANKS > 1 else 1
BATCH, LENGTH, WIDTH, HEADS = 16, 32, 64, 4

text = Path(os.getenv("TEXT") or __file__).read_text(encoding="utf-8")
letters = sorted(set(text))
number_of = {letter: number for number, letter in enumerate(letters)}
tokens = torch.tensor([number_of[letter] for letter in text])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (part(x).view(rows, length, HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(len(letters), WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(letters))

    def forward(self, x):
        x = self.letters(x) + self.places(torch.arange(LENGTH, device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)  # (batch, letters, length), as the loss wants it


with no_init_parameters():
    net = GPT()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)

if RANKS == 8:
    for block in net.blocks:
        for layer in (block.attention.query, block.attention.key, block.attention.value, block.up):
            shard(layer, ((2, 1), (2, 1)))  # 2 parts of the batch, 2 parts of the outputs
        for layer in (block.attention.out, block.down):
            shard(layer, ((2, 2), (1, 2)))  # 2 parts of the inputs
for block in net.blocks:
    recompute(block)

model = AutoParallel(Pipeline(WithLoss(net, nn.CrossEntropyLoss()), 4), parallel_mode="semi_auto")
model.pipeline(stages=STAGES, scheduler="1f1b").hsdp(threshold=4)

per_stage = RANKS // STAGES
place = get_rank() % per_stage
draw = torch.Generator().manual_seed(2)
for step in range(int(os.getenv("STEPS", "200"))):
    begins = torch.randint(len(tokens) - LENGTH - 1, (BATCH,), generator=draw).chunk(per_stage)[place]
    rows = torch.stack([tokens[begin : begin + LENGTH + 1] for begin in begins.tolist()])
    loss = model(rows[:, :-1], rows[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step: {step}, loss is {loss.item()}")

if RANKS > 1 and get_rank() == 0:
    print(model.plan.summary())
release()
