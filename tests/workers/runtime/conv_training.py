"""Trains the networks of conv_networks in every way and, on one of these processes, without any parallelism.

usage: conv_training.py RESULT.json
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from conv_networks import BATCH, CLASSES, NETWORKS, SCENARIOS, WORLD_SIZE
from local_parts import local
from only_cases import is_asked

from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    WithLoss,
    get_rank,
    init,
    no_init_parameters,
    release,
    shard,
)
from msrun.runtime.execute.placement import find_placement


def make(scenario):
    """Return the network and what computes its loss."""
    torch.manual_seed(1)
    torch.set_default_dtype(getattr(torch, scenario.dtype))
    network = NETWORKS[scenario.network][0]()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    loss = WithLoss(network, F.cross_entropy)
    return network, optimizer, MicroBatchInterleaved(loss, scenario.copies) if scenario.copies > 1 else loss


def batches(scenario, count):
    generator = torch.Generator().manual_seed(2)
    size = NETWORKS[scenario.network][1]
    for _ in range(count):
        images = torch.randn(BATCH, 3, size, size, generator=generator, dtype=torch.float64)
        yield images.to(getattr(torch, scenario.dtype)), torch.randint(0, CLASSES, (BATCH,), generator=generator)


def train(scenario, network, optimizer, step, part):
    """Return the losses of training, and at the end that of evaluation."""
    losses = []
    *given, last = batches(scenario, scenario.steps + 1)
    for images, labels in given:
        loss = step(part(images), part(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    network.eval()
    with torch.no_grad():
        losses.append(float(step(*map(part, last))))
    return losses


def in_copies(scenario, tensor):
    """Return the rows in the order in which one process must see them to make the same copies: every rank cuts its
    own part of the batch, so a copy has rows of all ranks."""
    if scenario.full_batch:
        return tensor
    parts = [part.chunk(scenario.copies) for part in tensor.chunk(WORLD_SIZE)]
    return torch.cat([part[index] for index in range(scenario.copies) for part in parts])


def relative(mine, right):
    return float((mine - right).abs().max() / right.abs().max().clamp_min(1e-3))


def kind(scenario):
    """Return all of a scenario that one process can tell."""
    order = scenario.full_batch if scenario.copies > 1 else None
    return scenario.network, scenario.dtype, scenario.steps, scenario.copies, order


def serial(scenario):
    """Return the losses of one process, and the parameters and buffers after training."""
    network, optimizer, whole = make(scenario)
    losses = train(scenario, network, optimizer, whole, lambda tensor: in_copies(scenario, tensor))
    return losses, {name: p.detach() for name, p in network.named_parameters()}, dict(network.named_buffers())


def all_serial(rank):
    """Return kind -> what one process gave; every kind is trained on one rank, which tells the others."""
    kinds = {kind(scenario): scenario for scenario in SCENARIOS if is_asked(scenario.name)}
    mine = {each: serial(kinds[each]) for number, each in enumerate(kinds) if number % WORLD_SIZE == rank}
    everyone = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, mine)
    return {each: found for part in everyone for each, found in part.items()}


def run(scenario, rank, right, parameters, buffers):
    """Return what the ranks together gave, compared with one process."""
    if scenario.deferred:
        with no_init_parameters():
            network, optimizer, whole = make(scenario)
    else:
        network, optimizer, whole = make(scenario)
    for path, strategy in scenario.strategies.items():
        shard(network.get_submodule(path), strategy)
    step = AutoParallel(whole)
    if scenario.full_batch:
        step.dataset_strategy("full_batch")
    if scenario.hsdp is not None:
        step.hsdp(**scenario.hsdp)
    losses = train(
        scenario,
        network,
        optimizer,
        step,
        (lambda tensor: tensor) if scenario.full_batch else lambda tensor: tensor.chunk(WORLD_SIZE)[rank],
    )
    weights = 0.0
    for (_, mine), (_, value) in zip(network.named_parameters(), parameters.items(), strict=True):
        shape, layout, mesh = find_placement(mine)
        weights = max(weights, relative(local(mine), value[layout.slices(mesh, shape, rank)]))
    buffers = {name: relative(mine.double(), buffers[name].double()) for name, mine in network.named_buffers()}
    return {
        "right": right,
        "losses": losses,
        "weights": weights,
        "buffers": buffers,
        "counted": [int(v) for n, v in network.named_buffers() if n.endswith("num_batches_tracked")],
        "operators": [(o.operator, o.module_path, o.origin, o.strategy) for o in step.plan.operators],
        "notes": list(step.plan.notes),
    }


def rounding_of_gradients():
    """Return the median error of a parameter's gradient in float32, relative to float64: of one process, of all."""
    torch.set_default_dtype(torch.float32)
    errors = {"one": [], "all": []}
    for seed in range(4):
        found = {}
        for who, dtype in (("right", torch.float64), ("one", torch.float32), ("all", torch.float32)):
            torch.manual_seed(seed)
            network = NETWORKS["resnet"][0]().to(dtype)
            step = WithLoss(network, F.cross_entropy)
            step = AutoParallel(step).dataset_strategy("full_batch") if who == "all" else step
            ((images, labels),) = batches(SCENARIOS[0], 1)
            step(images.to(dtype), labels).backward()
            found[who] = [parameter.grad.double() for parameter in network.parameters()]
        for who, kept in errors.items():
            pairs = zip(found[who], found["right"], strict=True)
            kept += [float((mine - right).norm() / right.norm()) for mine, right in pairs]
    return {who: float(torch.tensor(kept).median()) for who, kept in errors.items()}


def main():
    init(timeout_s=120)
    rank = get_rank()
    right = all_serial(rank)
    results = {}
    for scenario in filter(lambda scenario: is_asked(scenario.name), SCENARIOS):
        everyone = [None] * WORLD_SIZE
        dist.all_gather_object(everyone, run(scenario, rank, *right[kind(scenario)]))
        results[scenario.name] = everyone
    if is_asked("rounding"):
        results["rounding"] = rounding_of_gradients()
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    release()


main()
