"""Trains every network of random_scenarios in every way. usage: random_draws.py RESULT.json"""

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from only_cases import is_asked
from random_scenarios import NETWORKS, SCENARIOS, WORLD_SIZE, losses_of

from msrun.runtime import AutoParallel, Pipeline, get_rank, init, release
from msrun.runtime.nn.random_stream import take_stream_state


def streams_of_a_pipeline():
    """Return (seed, step) after a call without gradients and two steps of a network whose last stage alone draws."""
    torch.manual_seed(3 + get_rank())
    network = NETWORKS["vae"]().double().eval()
    step = AutoParallel(Pipeline(network, 2)).dataset_strategy("full_batch").pipeline(stages=2)
    x = torch.ones(8, 6, dtype=torch.float64)
    with torch.no_grad():
        step(x)
    for _ in range(2):
        step(x).backward()
    return take_stream_state(network.parameters())


def main():
    init(timeout_s=120)
    rank = get_rank()
    results = {}
    for name, way in SCENARIOS:
        if not is_asked(f"{name}/{way.name}"):
            continue
        torch.rand(rank + 1)  # what a rank draws for itself does not matter
        try:
            found = losses_of(name, way, lambda tensor: tensor.chunk(WORLD_SIZE)[rank])
        except Exception:  # all ranks fail alike, or the job ends by its deadline
            found = traceback.format_exc()
        everyone = [None] * WORLD_SIZE
        dist.all_gather_object(everyone, found)
        results[f"{name}/{way.name}"] = everyone
    if is_asked(key := "streams of a pipeline"):
        results[key] = [None] * WORLD_SIZE
        dist.all_gather_object(results[key], streams_of_a_pipeline())
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    release()


main()
