"""A small GPT whose optimizer works on the host: bfloat16 weights and gradients on the device, everything else there.

Start with `bash run.sh [TEXT]`. TEXT is any text file; without it the program learns its own letters. One process gives
the losses of several, but for the rounding of bfloat16: `python train.py`. PLACE=device trains the same network in
float32 with the optimizer on the device.
"""

import os
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import (
    AutoParallel,
    WithLoss,
    clip_grad_norm_,
    get_group_size,
    get_rank,
    init,
    no_init_parameters,
    optim,
    release,
)

init()
torch.manual_seed(1)
ON_HOST = os.getenv("PLACE", "host") == "host"
DTYPE = torch.bfloat16 if ON_HOST else torch.float32
BATCH, LENGTH, WIDTH, HEADS = 16, 32, 64, 4

text = Path(os.getenv("TEXT") or __file__).read_text(encoding="utf-8")
letters = sorted(set(text))
number_of = {letter: number for number, letter in enumerate(letters)}
tokens = torch.tensor([number_of[letter] for letter in text])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (part(y).view(rows, length, HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(len(letters), WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(letters))
        self.to(DTYPE)

    def forward(self, x):
        x = self.letters(x) + self.places(torch.arange(LENGTH, device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)  # (batch, letters, length), as the loss wants it


with no_init_parameters():
    net = GPT()
    optimizer = optim.AdamW(net.parameters(), lr=3e-3, target="CPU" if ON_HOST else "device")

model = AutoParallel(WithLoss(net, nn.CrossEntropyLoss()), parallel_mode="semi_auto").hsdp(threshold=4)
if ON_HOST:
    model.offload_gradients(optimizer)

ranks, place = get_group_size(), get_rank()
draw = torch.Generator().manual_seed(2)
for step in range(int(os.getenv("STEPS", "200"))):
    begins = torch.randint(len(tokens) - LENGTH - 1, (BATCH,), generator=draw).chunk(ranks)[place]
    rows = torch.stack([tokens[begin : begin + LENGTH + 1] for begin in begins.tolist()])
    loss = model(rows[:, :-1], rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step: {step}, loss is {loss.item()}")

if place == 0:
    print(optimizer.memory())
release()
