"""Trains with a table on parameter servers, with a checkpoint after every step, and goes on from the last one.

usage: server_training.py STEPS PAUSE; in its first attempt every rank makes the file at_RANK before step PAUSE, which
it then begins when the file go is there. With PAUSE -1 there are no checkpoints.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from msrun.runtime import (
    get_group_size,
    get_rank,
    init,
    latest_checkpoint,
    load_checkpoint,
    optim,
    release,
    save_checkpoint,
    set_param_ps,
    set_ps_context,
)


def main():
    steps, pause = int(sys.argv[1]), int(sys.argv[2])
    init()
    set_ps_context(enable_ps=True)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(12, 2)).double()
    set_param_ps(network)
    optimizer = optim.Adam(network.parameters(), lr=0.05)
    done, path = 0, latest_checkpoint("checkpoints")
    if path is not None:
        done = load_checkpoint(path, network, optimizer)["step_num"]
    rank, ranks = get_rank(), get_group_size()
    for step in range(done, steps):
        if step == pause and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            Path(f"at_{rank}").touch()
            while not Path("go").exists():
                time.sleep(0.01)
        rows = torch.randint(0, 30, (8, 3), generator=torch.Generator().manual_seed(step))[rank::ranks]
        loss = network(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {float(loss.detach())!r}")
        if pause >= 0:
            save_checkpoint(network, f"checkpoints/step_{step + 1}", optimizer, step_num=step + 1)
    release()


main()
