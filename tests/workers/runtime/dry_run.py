"""Trains one network for two steps, for real or in a dry run; for real every rank writes what a dry run predicts,
and of "level3" rank 0 a profile.

Arguments: how it is trained, and the file to write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    Pipeline,
    WithLoss,
    calibrate,
    get_rank,
    init,
    recompute,
    shard,
)
from msrun.runtime.execute.plain_tensors import plain
from msrun.runtime.execute.traffic import traffic

WIDTH, ROWS, WORDS, LENGTH = 32, 8, 20, 6


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 2, 3 * WIDTH // 2).transpose(1, 2).chunk(3, -1)
        x = x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(gelu(self.up(x)))


class Network(nn.Module):
    """Words to words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """(batch, length) -> (batch x length, words)."""
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)


def loss_of(result: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss."""
    return cross_entropy(result, target.flatten())


def main() -> None:
    """Train."""
    how, target = sys.argv[1:]
    init()
    network = Network()
    if how == "tensor parallel":
        for block in network.blocks:
            shard(block.up, ((1, 1, 1), (2, 1), (2,)))
            shard(block.down, ((1, 1, 2), (1, 2), (1,)))
    if how == "recompute":
        recompute(network.blocks[0])
    trained: nn.Module = WithLoss(network, loss_of)
    if how == "micro batches":
        trained = GradAccumulation(trained, 2)
    if how == "pipeline":
        trained = Pipeline(trained, 4)
    optimizer = torch.optim.AdamW(trained.parameters())
    parallel = AutoParallel(trained)
    if how in ("level1", "level3"):
        parallel.hsdp(threshold=0, optimizer_level=how)
    if how == "pipeline":
        parallel.pipeline(stages=2)
    words = torch.randint(WORDS, (ROWS, LENGTH))

    def step() -> None:
        traffic.reset()
        loss = parallel(words, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    seen = {
        "parameter_bytes": sum(plain(value).nbytes for value in trained.parameters()),
        "optimizer_state_bytes": sum(plain(value).nbytes for value in states),
        "traffic": {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes)},
    }
    Path(f"{target}.{get_rank()}").write_text(json.dumps(seen))
    if how == "level3":
        calibrate(f"{target}.json", step=step)


if __name__ == "__main__":
    main()
