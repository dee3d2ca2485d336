"""stuck.py HOW: four ranks train with the runtime; from the third step on rank 1 does as HOW says.

HOW: sleep, spin, stop (stops itself), leave (ends with exit code 0), release (leaves the world and goes on),
pipeline (sleeps; two stages train).
BACKEND names another backend.
"""

import os
import signal
import sys
import time

import torch
from torch import nn

from msrun.runtime import AutoParallel, Pipeline, device, init, release

HOW = sys.argv[1]
RANK = int(os.environ["RANK"])


def hold_the_others_up():
    while HOW == "spin":
        pass
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


class MeanOf(nn.Sequential):
    def forward(self, x):
        return super().forward(x).mean()


print(f"rank {RANK} begins", flush=True)
if "SHARED_DEVICE" in os.environ:  # all ranks use this one
    os.environ["CUDA_VISIBLE_DEVICES"], os.environ["DEVICE_ID"] = os.environ["SHARED_DEVICE"], "0"
init(os.environ.get("BACKEND"))
torch.manual_seed(1)
if HOW == "pipeline":
    net = AutoParallel(Pipeline(MeanOf(nn.Linear(8, 8), nn.Linear(8, 8)), 2)).pipeline(2)
else:
    net = AutoParallel(nn.Linear(8, 8, device=device()), parallel_mode="semi_auto").hsdp(threshold=0)
for step in range(1, 10):
    if RANK == 1 and step == 3:
        if HOW == "leave":
            os._exit(0)
        if HOW == "release":
            release()
        hold_the_others_up()
    net(torch.ones(4, 8, device=device())).sum().backward()
    print(f"step {step}", flush=True)
