"""Builds and trains a network that is larger than what one rank may hold; writes how much memory each rank took.

usage: large.py RESULT.json
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import AutoParallel, WithLoss, get_group_size, get_rank, init, no_init_parameters, release, shard

LAYERS, WIDTH = 24, 1024


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Network(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def train(layers, width, way):
    """Return the network after one step, and the most bytes that this took."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    size = get_group_size()
    with no_init_parameters():
        network = Network(layers, width)
    built = status("VmHWM") - before
    if way == "tensor parallel":
        for number, layer in enumerate(network.layers):
            shard(layer, ((1, 1), (size, 1), (size,)) if number % 2 == 0 else ((1, size), (1, size), (1,)))
    step = AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch")
    if way == "level3":
        step.hsdp(optimizer_level="level3").comm_fusion({"openstate": False})
    step(torch.ones(size, width), torch.ones(size, width)).backward()
    stored = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    return {
        "whole": step.plan.global_bytes,
        "layers": layers,
        "stored": stored,
        "built": built,
        "peak": status("VmHWM") - before,
    }


def main():
    init(timeout_s=60)
    results = {}
    for way in ("level3", "tensor parallel"):
        train(2, 16, way)  # imports and groups
        results[way] = train(LAYERS, WIDTH, way)
    everyone = [None] * get_group_size()
    dist.all_gather_object(everyone, results)
    if get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(everyone))
    release()


main()
