"""The script of benchmarks/simulate_large.py; its argument is the number of layers, 54 for 100e9 parameters."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from msrun.runtime import AutoParallel, WithLoss, get_group_size, init, shard

WIDTH, HEADS, WORDS, LENGTH, TENSOR_PARALLEL = 12288, 96, 50304, 2048, 8


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        rows, length, width = x.shape
        y = self.first(x)
        q, k, v = (m(y).view(rows, length, HEADS, width // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(y)
        return x + self.down(gelu(self.up(self.second(x))))


def main() -> None:
    """Build the network and call it once."""
    init()
    torch.set_default_dtype(torch.bfloat16)
    copies = get_group_size() // TENSOR_PARALLEL
    blocks = [Block() for _ in range(int(sys.argv[1]))]
    for block in blocks:
        for layer in (block.q, block.k, block.v, block.up):
            shard(layer, ((copies, 1, 1), (TENSOR_PARALLEL, 1), (TENSOR_PARALLEL,)))
        for layer in (block.out, block.down):
            shard(layer, ((copies, 1, TENSOR_PARALLEL), (1, TENSOR_PARALLEL), (1,)))
    net = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS), nn.Flatten(0, 1))
    print(f"{sum(parameter.numel() for parameter in net.parameters()) / 1e9:.1f}e9 parameters")
    net = WithLoss(net, cross_entropy)
    optimizer = torch.optim.AdamW(net.parameters())
    step = AutoParallel(net).hsdp(shard_size=8).dataset_strategy(((copies, 1), (copies,)))
    words = torch.randint(WORDS, (1, LENGTH))
    step(words, words.flatten()).backward()
    optimizer.step()


if __name__ == "__main__":
    main()
