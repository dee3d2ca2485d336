"""Trains a small GPT in every way of transformer_scenarios.

usage: transformer.py RESULT.json
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from transformer_scenarios import SCENARIOS, WORLD_SIZE, build, train

from msrun.runtime import get_rank, init, release


def part_of(scenario, rank):
    if scenario.dataset == "full_batch":
        return lambda tensor: tensor
    parts = WORLD_SIZE if scenario.dataset == "data_parallel" else scenario.dataset[0][0]
    return lambda tensor: tensor.chunk(parts)[rank * parts // WORLD_SIZE]


def main():
    init(timeout_s=60)
    rank = get_rank()
    results = {}
    for scenario in SCENARIOS:
        network, optimizer = build(scenario)
        losses, step = train(network, optimizer, scenario, part_of(scenario, rank))
        everyone = [None] * WORLD_SIZE
        dist.all_gather_object(everyone, losses)
        results[scenario.name] = {
            "losses": everyone,
            "notes": step.plan.notes if scenario.mode == "semi_auto" else [],
            "explain": step.plan.explain() if scenario.mode == "semi_auto" else "",
        }
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    release()


main()
