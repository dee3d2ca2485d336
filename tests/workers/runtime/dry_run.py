"""Trains one network for two steps, for real or in a dry run; for real every rank writes what a dry run predicts,
and of "level3" rank 0 a profile.

Arguments: how it is trained, and the file to write.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
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
from msrun.runtime.execute.transfers import Traffic, traffic
from msrun.runtime.tensors.plain_tensors import plain
from msrun.shm.process_group import ShmGroup
from msrun.shm.work import listed

WIDTH, ROWS, WORDS, LENGTH = 32, 8, 20, 6
UNCAPTURED = ("data parallel", "data parallel level3")
INPUTS = {
    "allreduce": ("all_reduce", 0),
    "all_gather_single": ("all_gather", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
}
"""Method of a group -> its word in a report, and which argument this rank gives."""


@contextmanager
def counting_all():
    """Count what is sent, by torch's own DDP and FSDP2 too, which the run-time counter does not see."""
    counted, own = Traffic(), {name: getattr(ShmGroup, name) for name in INPUTS}

    def counting(name):
        word, index = INPUTS[name]

        def send(group, *args):
            for value in listed(args[index]):
                counted.add(word, value)
            return own[name](group, *args)

        return send

    for name in INPUTS:
        setattr(ShmGroup, name, counting(name))
    try:
        yield counted
    finally:
        for name, method in own.items():
            setattr(ShmGroup, name, method)


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """(batch, length, width) -> the same."""
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 2, 3 * WIDTH // 2).transpose(1, 2).chunk(3, -1)
        x = x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(gelu(self.up(x)))


class Network(nn.Module):
    """Words to words."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        """(batch, length) -> (batch x length, words)."""
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)


def local(value):
    """Return this rank's part."""
    return value.to_local() if isinstance(value, DTensor) else plain(value)


def loss_of(result, target):
    """Return the mean loss."""
    return cross_entropy(result, target.flatten())


def main():
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
    trained = WithLoss(network, loss_of)
    if how == "micro batches":
        trained = GradAccumulation(trained, 2)
    if how == "pipeline":
        trained = Pipeline(trained, 4)
    optimizer = torch.optim.AdamW(trained.parameters())
    parallel = AutoParallel(trained, "data_parallel" if how in UNCAPTURED else "semi_auto")
    if how.endswith(("level1", "level3")):
        parallel.hsdp(threshold=0, optimizer_level=how.split()[-1])
    if how == "pipeline":
        parallel.pipeline(stages=2)
    words = torch.randint(WORDS, (ROWS, LENGTH))

    def step():
        traffic.reset()
        loss = parallel(words, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with counting_all() as sent:
        step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    counted = sent if how in UNCAPTURED else traffic
    seen = {
        "parameter_bytes": sum(local(value).nbytes for value in trained.parameters()),
        "optimizer_state_bytes": sum(local(value).nbytes for value in states),
        "traffic": {"calls": dict(counted.calls), "bytes": dict(counted.bytes)},
    }
    Path(f"{target}.{get_rank()}").write_text(json.dumps(seen))
    if how == "level3":
        calibrate(f"{target}.json", step=step)


if __name__ == "__main__":
    main()
