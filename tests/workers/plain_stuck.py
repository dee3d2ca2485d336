"""A plain torch job, without the runtime, in which rank 1 sleeps in a function of its own and holds the others up."""

import os
import time

import torch
import torch.distributed as dist


def hold_the_others_up():
    time.sleep(600)


def step():
    dist.all_reduce(torch.ones(1))


dist.init_process_group("gloo")
step()
if os.environ["RANK"] == "1":
    hold_the_others_up()
step()
