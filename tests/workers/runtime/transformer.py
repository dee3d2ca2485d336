"""Trains a small GPT in every way of transformer_scenarios.

usage: transformer.py RESULT.json CHECKPOINT; the first one's checkpoint after SAVED_AFTER steps is written there.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from only_cases import is_asked
from transformer_scenarios import RESUMED, SAVED_AFTER, SCENARIOS, WORLD_SIZE, build, train, wrap

from msrun.runtime import get_rank, init, load_checkpoint, release, save_checkpoint


def part_of(scenario, rank):
    if scenario.dataset == "full_batch":
        return lambda tensor: tensor
    parts = WORLD_SIZE if scenario.dataset == "data_parallel" else scenario.dataset[0][0]
    return lambda tensor: tensor.chunk(parts)[rank * parts // WORLD_SIZE]


def main():
    init(timeout_s=120)
    rank = get_rank()
    results = {}
    for scenario in filter(lambda scenario: is_asked(scenario.name), SCENARIOS):
        network, optimizer = build(scenario)
        step, take, begin = wrap(network, scenario), part_of(scenario, rank), 0
        losses = []
        if scenario is SCENARIOS[0]:
            losses, begin = train(step, optimizer, range(SAVED_AFTER), take), SAVED_AFTER
            save_checkpoint(network, sys.argv[2], optimizer)
        losses += train(step, optimizer, range(begin, scenario.steps), take)
        everyone = [None] * WORLD_SIZE
        dist.all_gather_object(everyone, losses)
        results[scenario.name] = {
            "losses": everyone,
            "notes": step.plan.notes if scenario.mode == "semi_auto" else [],
            "explain": step.plan.explain() if scenario.mode == "semi_auto" else "",
        }
    if is_asked(SCENARIOS[0].name):
        network, optimizer = build(RESUMED)
        step = wrap(network, RESUMED)
        torch.manual_seed(1234)
        load_checkpoint(sys.argv[2], network, optimizer)
        results["resumed"] = train(step, optimizer, range(SAVED_AFTER, RESUMED.steps), part_of(RESUMED, rank))
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    release()


main()
