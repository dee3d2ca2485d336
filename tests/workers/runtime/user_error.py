"""Rank 0 alone fails, in the network or with an illegal setting. usage: user_error.py forward|setting"""

import sys

import torch
from torch import nn

from msrun.runtime import AutoParallel, get_rank, init


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.fc(x)
        raise ValueError(f"{len(hidden)} rows are too many")


init()
if get_rank() == 0:
    net = AutoParallel(Network(), "stand_alone")
    if sys.argv[1] == "setting":
        net.hsdp()
    net(torch.ones(3, 4))
