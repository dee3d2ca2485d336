"""A job of benchmarks/simulate.py: trains a network and writes what a dry run of it should have said.

Arguments: network, mode, the file of device profiles, the file for the figures, and the number of rounds. For real each
round measures a profile between two halves of its timed steps; in a dry run the first step ends the script.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from msrun.runtime import AutoParallel, Pipeline, WithLoss, calibrate, get_rank, init
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.tensors.plain_tensors import plain

STEPS = 5  # before a profile is measured, and as many after it
WIDTH, HEADS, WORDS, LENGTH = 256, 4, 1000, 128
UNCAPTURED = ("ddp", "fsdp")


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        rows, length, width = x.shape
        y = self.first(x)
        q, k, v = (m(y).view(rows, length, HEADS, width // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(y)
        return x + self.down(gelu(self.up(self.second(x))))


def build(network: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network with its batch and target."""
    if network == "mlp":
        layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(256, 1024), torch.randint(10, (256,))
    if network == "conv":
        sizes = ((3, 32), (32, 64), (64, 128))
        layers = [m for a, b in sizes for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10))
        return net, torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    blocks = [Block() for _ in range(4)]
    net = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS), nn.Flatten(0, 1))
    return net, torch.randint(WORDS, (4, LENGTH)), torch.randint(WORDS, (4 * LENGTH,))


def main() -> None:
    """Train, and write the figures of this rank."""
    network, mode, profile, result, rounds = sys.argv[1:]
    init()
    torch.manual_seed(0)
    net, batch, target = build(network)
    net = WithLoss(net, cross_entropy)
    if mode == "pipeline":
        net = Pipeline(net, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    parallel = AutoParallel(net, "data_parallel" if mode in UNCAPTURED else "semi_auto")
    if mode.startswith("level"):
        parallel.hsdp(threshold=16, optimizer_level=mode)
    if mode == "fsdp":
        parallel.hsdp(threshold=16, optimizer_level="level3")
    if mode == "pipeline":
        parallel.dataset_strategy("full_batch").pipeline(stages=2)

    def step() -> tuple[float, float]:
        begin = time.perf_counter(), time.process_time()
        loss = parallel(batch, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        return time.perf_counter() - begin[0], time.process_time() - begin[1]

    step(), step()
    traffic.reset()
    step()
    moved = {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes)}
    times = []
    for number in range(int(rounds)):
        found = [step() for _ in range(STEPS)]
        calibrate(f"{profile}.{number}.json", step=step)
        found += [step() for _ in range(STEPS)]
        times.append([statistics.mean(each) for each in zip(*found, strict=True)])
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
        step()
    parameters = sum(local(value).nbytes for value in net.parameters())
    state = sum(local(value).nbytes for found in optimizer.state.values() for value in found.values())
    buckets = parameters if mode == "ddp" else 0  # DDP keeps them from step to step
    figures = {
        "parameter_bytes": parameters,
        "optimizer_state_bytes": state,
        "peak_bytes": parameters + state + buckets + peak_of(watched),
        "traffic": None if mode in UNCAPTURED else moved,
        "step_s": [seconds for seconds, _ in times],
        "processor_s": [processor_s for _, processor_s in times],
    }
    Path(f"{result}.{get_rank()}").write_text(json.dumps(figures))


def local(value: Tensor) -> Tensor:
    """Return this rank's part."""
    return value.to_local() if isinstance(value, DTensor) else plain(value)


def peak_of(watched: torch.profiler.profile) -> int:
    """Return the most bytes that torch's allocator held beyond those at the beginning."""
    events = watched.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, nbytes in changes:
        now += nbytes
        peak = max(peak, now)
    return peak


if __name__ == "__main__":
    main()
