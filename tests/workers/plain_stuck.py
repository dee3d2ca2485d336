"""plain_stuck.py HOW: a plain torch job, without the runtime, in which rank 1 holds the others up.

HOW: sleep (rank 1 sleeps in a function of its own), ddp (the same, the others wait in DistributedDataParallel), work
(the others wait for a handle).
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def hold_the_others_up() -> None:
    time.sleep(600)


def step(model: torch.nn.Module) -> None:
    if sys.argv[1] == "ddp":
        model(torch.ones(4, 2)).sum().backward()
    elif sys.argv[1] == "work":
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()
    else:
        dist.all_reduce(torch.ones(1))


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 1))
step(model)
if os.environ["RANK"] == "1":
    hold_the_others_up()
step(model)
