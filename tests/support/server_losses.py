"""What workers/runtime/server_training.py prints, and what it should."""

import re

import torch
from torch import nn

LINE = re.compile(rb"^step (\d+) loss (\S+)$", re.MULTILINE)


def losses(*logs):
    """Return step -> loss of a worker, from its logs."""
    return {int(step): float(loss) for log in logs for step, loss in LINE.findall(log.read_bytes())}


def expected_losses(steps):
    """Return by rank what server_training.py prints when nothing goes wrong, from one process."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(12, 2)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    found = [{}, {}]
    for step in range(steps):
        rows = torch.randint(0, 30, (8, 3), generator=torch.Generator().manual_seed(step))
        of_ranks = [network(rows[rank::2]).square().mean() for rank in range(2)]
        for rank, loss in enumerate(of_ranks):
            found[rank][step + 1] = float(loss.detach())
        optimizer.zero_grad()
        (sum(of_ranks) / 2).backward()
        optimizer.step()
    return found
