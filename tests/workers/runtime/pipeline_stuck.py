"""Two stages train; from the third step on rank 1 sleeps."""

import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import AutoParallel, Pipeline, WithLoss, get_rank, init

init()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
step = AutoParallel(Pipeline(WithLoss(net, F.mse_loss), 2)).pipeline(2)
for number in range(1, 10):
    if get_rank() == 1 and number == 3:
        time.sleep(600)
    step(torch.ones(4, 8), torch.ones(4, 8)).backward()
