"""Times steps with searched strategies beside uniform plans, in turns; started by `search.py` on all ranks.

usage: search_job.py NETWORK ROUNDS RESULT.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from search_networks import Convolutions, Perceptron, Transformer
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, get_group_size, get_rank, init, release, shard

Batch = tuple[Tensor, Tensor]
MODE = "dynamic_programming"


def perceptron() -> tuple[nn.Module, Batch]:
    """Weights that are large beside the batch."""
    return Perceptron(256, 2048, 2), (torch.randn(64, 256), torch.randint(0, 16, (64,)))


def transformer() -> tuple[nn.Module, Batch]:
    """Two blocks."""
    text = torch.randint(0, 1024, (8, 64))
    return Transformer(2, width=256, heads=8, vocabulary=1024), (text, text.roll(1, 1))


def convolutions() -> tuple[nn.Module, Batch]:
    """Small weights beside large images."""
    return Convolutions(), (torch.randn(32, 3, 32, 32), torch.randint(0, 16, (32,)))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "mlp": perceptron,
    "transformer": transformer,
    "conv": convolutions,
}


def cut(network: nn.Module, data: int, model: int) -> None:
    """Cut pairs of layers by columns and rows over `model` ranks, and the batch over `data`."""
    if model == 1:
        return
    batch = (data, 1) if isinstance(network, Perceptron | Convolutions) else (data, 1, 1)
    columns = (batch, (model, 1))
    rows = ((*batch[:-1], model), (1, model))
    if isinstance(network, Transformer):
        for block in network.blocks:
            for layer in (block.query, block.key, block.value, block.gate, block.up):
                shard(layer, columns)
            for layer in (block.out, block.down):
                shard(layer, rows)
    elif isinstance(network, Perceptron):
        for number, layer in enumerate(network.layers):
            shard(layer, rows if number % 2 else columns)
    elif isinstance(network, Convolutions):
        shard(network.wide, columns)
        shard(network.last, rows)


def build(name: str, plan: str) -> tuple[AutoParallel, Batch]:
    """Return a network with a plan, and the whole batch."""
    torch.manual_seed(1)
    network, batch = NETWORKS[name]()
    ranks = get_group_size()
    if plan == "searched":
        return AutoParallel(network, MODE).dataset_strategy("full_batch").search("cpu"), batch
    data, model = {"dp": (ranks, 1), "hsdp": (ranks, 1), "tp": (1, ranks), "dp x tp": (2, ranks // 2)}[plan]
    cut(network, data, model)
    step = AutoParallel(network).dataset_strategy("full_batch")
    return (step.hsdp(threshold=0) if plan == "hsdp" else step), batch


def one_step(step: AutoParallel, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Return the seconds of one step, of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    optimizer.zero_grad()
    step(*batch).backward()
    optimizer.step()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def main() -> None:
    """Build every plan that is legal, and take turns."""
    name, rounds, result = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    init()
    torch.set_num_threads(1)
    plans, times = {}, {}
    for plan in ("searched", "dp", "hsdp", "tp", "dp x tp"):
        step, batch = build(name, plan)
        optimizer = torch.optim.Adam(step.parameters(), lr=1e-3)
        try:
            one_step(step, optimizer, batch)
        except StrategyError as error:
            if get_rank() == 0:
                print(f"{name} {plan}: {error}", file=sys.stderr)
            continue
        one_step(step, optimizer, batch)
        plans[plan], times[plan] = (step, optimizer, batch), list[float]()
    for _ in range(rounds):
        for plan, given in plans.items():
            times[plan].append(one_step(*given))
    if get_rank() == 0:
        found = {
            plan: {
                "median_s": statistics.median(seconds),
                "least_s": min(seconds),
                "priced_s": plans[plan][0].plan.price.seconds if plan == "searched" else None,
            }
            for plan, seconds in times.items()
        }
        result.write_text(json.dumps(found))
    release()


main()
