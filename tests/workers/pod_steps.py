"""Optimizer parallel over all pods; rank 0 writes its losses and those of plain torch in one process."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import AutoParallel, WithLoss, get_rank, init, optim, release

torch.set_default_dtype(torch.float64)
init()


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def train(step, optimizer):
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(4):
        inputs, labels = torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
        loss = step(inputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


net = build()
optimizer = optim.SGD(net.parameters(), lr=0.1)
parallel = AutoParallel(WithLoss(net, nn.CrossEntropyLoss()), parallel_mode="semi_auto").hsdp(threshold=0)
losses = train(parallel.dataset_strategy("full_batch"), optimizer)
if get_rank() == 0:
    alone = build()
    expected = train(WithLoss(alone, nn.CrossEntropyLoss()), torch.optim.SGD(alone.parameters(), lr=0.1))
    table = os.environ["RANK_TABLE_FILE"]
    found = {
        "losses": losses,
        "expected": expected,
        "is_link": Path(table).is_symlink(),
        "table": Path(table).read_text(),
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
release()
