"""Builds and trains a network that is larger than what one rank may hold, and measures it. Used by steps.py."""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from only_cases import is_asked
from torch import nn

from msrun.runtime import AutoParallel, WithLoss, get_group_size, no_init_parameters, shard

LAYERS, WIDTH = 32, 512


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
    """Return the bytes of a network, of this rank's part, and the most that building it and one step took."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS") - status("RssShmem")  # the memory that carries messages belongs to all ranks together
    size = get_group_size()
    with no_init_parameters():
        network = Network(layers, width)
    built = status("VmHWM") - status("RssShmem") - before
    if way == "tensor parallel":
        for number, layer in enumerate(network.layers):
            shard(layer, ((1, 1), (size, 1), (size,)) if number % 2 == 0 else ((1, size), (1, size), (1,)))
    step = AutoParallel(WithLoss(network, F.mse_loss)).dataset_strategy("full_batch")
    if way == "level3":
        step.hsdp(optimizer_level="level3").comm_fusion({"openstate": False})
    step(torch.ones(size, width), torch.ones(size, width)).backward()
    stored = sum(part.numel() * part.element_size() for part in map(local, network.parameters()))
    return {
        "whole": step.plan.global_bytes,
        "layers": layers,
        "stored": stored,
        "built": built,
        "peak": status("VmHWM") - status("RssShmem") - before,
    }


def measure():
    """Return what the network takes on this rank, in both ways, as far as they are asked for."""
    return {way: train(LAYERS, WIDTH, way) for way in ("level3", "tensor parallel") if is_asked(way)}
