"""Join a gloo group so that every pair of ranks is connected, say so, and wait."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for peer in range(dist.get_world_size()):
    value = torch.ones(1)
    dist.broadcast(value, src=peer)
dist.all_reduce(torch.ones(1))
Path(f"ready_{os.environ['RANK']}").touch()
time.sleep(600)
