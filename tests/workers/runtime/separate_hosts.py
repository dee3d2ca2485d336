"""Ranks that see nothing of each other's folder, as on hosts that share none: each mounts its own over it. Needs root.

usage: separate_hosts.py FOLDER SHARED RESULT.json
FOLDER is another one for every rank, SHARED the same; SHARED/own gets a network that is cut by hand.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.errors import CheckpointError
from msrun.runtime import (
    AutoParallel,
    WithLoss,
    get_rank,
    init,
    latest_checkpoint,
    layerwise_parallel,
    load_checkpoint,
    release,
    save_checkpoint,
)

CLONE_NEWNS = 0x00020000
folder, shared, result = map(Path, sys.argv[1:4])
if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
    raise OSError(ctypes.get_errno(), "unshare")
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)


def message_of(call):
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "no error"


def build(seed):
    torch.manual_seed(seed)
    network = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(network.parameters(), 0.1)
    return network, optimizer, AutoParallel(WithLoss(network, F.mse_loss)).hsdp(threshold=0)


def train(step, optimizer):
    loss = step(torch.ones(2, 8), torch.ones(2, 8))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


init(timeout_s=60)
network, optimizer, step = build(1)
train(step, optimizer)
found = {"losses": []}
for name, form in (
    ("parts", {"integrated_save": False}),
    ("whole", {}),
    ("beside", {"integrated_save": False, "async_save": True}),
):
    save_checkpoint(step, folder / f"{name}.ckpt", optimizer, **form)
right = train(step, optimizer)
found["newest"] = latest_checkpoint(folder).name
found["files"] = {path.name: path.is_dir() for path in sorted(folder.iterdir())}
for name in ("parts", "whole", "beside"):
    other, its, again = build(2)
    load_checkpoint(folder / f"{name}.ckpt", other, its)
    found["losses"].append([train(again, its), right])
if get_rank() == 1:
    shutil.rmtree(folder / "beside.ckpt")
dist.barrier()
found["newest of all"] = latest_checkpoint(folder).name
found["gone on one"] = message_of(lambda: load_checkpoint(folder / "beside.ckpt", build(2)[0]))
own = nn.Module()
own.weight = layerwise_parallel(nn.Parameter(torch.full((2,), float(get_rank()))))
save_checkpoint(own, shared / "own")
everyone = [None, None]
dist.all_gather_object(everyone, found)
if get_rank() == 0:
    result.write_text(json.dumps(everyone))
os.sync()
release()
