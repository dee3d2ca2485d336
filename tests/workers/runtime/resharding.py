"""Trains a network in some layouts, writes a checkpoint of each in the middle, and goes on from those of other jobs.

usage: resharding.py FOLDER RESULT.json write|read
write: each of LAYOUTS trains STEPS steps; after HALF of them its checkpoint is written to FOLDER/NAME.
read: LAYOUTS go on from every checkpoint of FOLDER, every third one from each.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import (
    AutoParallel,
    WithLoss,
    get_group_size,
    get_rank,
    init,
    load_checkpoint,
    no_init_parameters,
    optim,
    release,
    save_checkpoint,
    shard,
)

STEPS, HALF, BATCH = 6, 3, 16
LAYOUTS = {
    "plain": {},
    "level1": {"hsdp": {"threshold": 0}},
    "level2-deferred": {"hsdp": {"threshold": 0, "optimizer_level": "level2"}, "deferred": True},
    "level3-pairs": {"hsdp": {"threshold": 0, "shard_size": 2, "optimizer_level": "level3"}},
    "columns": {"cut": {"layer1": ((1, 1), (-1, 1), (-1,))}},
    "rows-and-hsdp-deferred": {
        "cut": {"layer2": ((1, 2), (1, 2))},
        "hsdp": {"threshold": 0, "optimizer_level": "level2"},
        "deferred": True,
    },
    "ddp": {"mode": "data_parallel"},
    "ddp-deferred": {"mode": "data_parallel", "deferred": True},
}
WRITERS = {"level1": "adamw", "level3-pairs": "momentum", "rows-and-hsdp-deferred": "adamw", "ddp": "torch-sgd"}
OPTIMIZERS = {
    "momentum": lambda p: optim.Momentum(p, 0.05, 0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "torch-sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(8, 16)
        self.layer2 = nn.Linear(16, 16)
        self.layer3 = nn.Linear(16, 4)

    def forward(self, x):
        return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))


def build(settings, optimizer_name, seed):
    torch.manual_seed(seed)
    if settings.get("deferred"):
        with no_init_parameters():
            network = Network()
            optimizer = OPTIMIZERS[optimizer_name](network.parameters())
    else:
        network = Network()
        optimizer = OPTIMIZERS[optimizer_name](network.parameters())
    for name, strategy in settings.get("cut", {}).items():
        numbers = tuple(tuple(get_group_size() if n == -1 else n for n in row) for row in strategy)
        shard(getattr(network, name), numbers)
    step = AutoParallel(WithLoss(network, F.cross_entropy), settings.get("mode", "semi_auto"))
    if "hsdp" in settings:
        step.hsdp(**settings["hsdp"])
    return network, optimizer, step


def train(step, optimizer, first, last):
    losses = []
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(BATCH, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 4, (BATCH,), generator=generator)
        size, rank = get_group_size(), get_rank()
        loss = step(images.chunk(size)[rank], labels.chunk(size)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def write(folder):
    results = {}
    for name, optimizer_name in WRITERS.items():
        network, optimizer, step = build(LAYOUTS[name], optimizer_name, seed=1)
        losses = train(step, optimizer, 0, HALF)
        save_checkpoint(network, folder / name, optimizer, step_num=HALF)
        results[name] = losses + train(step, optimizer, HALF, STEPS)
    return results


def read(folder):
    results = {}
    for number, (source, optimizer_name) in enumerate(WRITERS.items()):
        names = [name for name in LAYOUTS if get_group_size() > 1 or name in ("plain", "level1", "ddp-deferred")]
        for target in names[number % 3 :: 3]:
            settings = LAYOUTS[target]
            network, optimizer, step = build(settings, optimizer_name, seed=2)
            before = list(network.parameters())
            load_checkpoint(folder / source, network, optimizer)
            results[f"{source} -> {target}"] = train(step, optimizer, HALF, STEPS)
            assert all(a is b for a, b in zip(before, network.parameters(), strict=True))
        # into parameters that have their places already
        network, optimizer, step = build(LAYOUTS["level1"], optimizer_name, seed=2)
        train(step, optimizer, 0, 1)
        done = load_checkpoint(folder / source, step, optimizer)
        results[f"{source} -> placed"] = train(step, optimizer, done["step_num"], STEPS)
        # and back again, bit by bit
        load_checkpoint(folder / source, network, optimizer)
        again = save_checkpoint(network, folder / f"{source} of {get_group_size()}", optimizer)
        first, second = load_checkpoint(folder / source), load_checkpoint(again)
        tensors = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
        assert len(tensors) == 6
        assert all(torch.equal(first[name], second[name]) for name in tensors)
    return results


def main():
    torch.set_default_dtype(torch.float64)
    init(timeout_s=120)
    folder = Path(sys.argv[1])
    mine = (write if sys.argv[3] == "write" else read)(folder)
    everyone = [mine]
    if dist.is_initialized():
        everyone = [None] * get_group_size()
        dist.all_gather_object(everyone, mine)
    if get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(everyone))
    release()


main()
