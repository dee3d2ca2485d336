"""Runs every case of step_cases and, on this very process, one process's training; writes what came out.

usage: steps.py RESULT.json
"""

import json
import sys
from pathlib import Path

import step_measures
import step_memory
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from only_cases import is_asked
from step_cases import BLOCKS, CASES, CLASSES, FEATURES, GLOBAL_BATCH, HIDDEN, WIDTH, WORLD_SIZE
from torch import nn

from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    LossMonitor,
    MicroBatchInterleaved,
    Model,
    WithLoss,
    get_rank,
    init,
    optim,
    recompute,
    release,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.placement import find_placement
from msrun.runtime.execute.transfers import traffic


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make_network(dtype):
    torch.manual_seed(1)
    torch.set_default_dtype(dtype)
    return Network()


def batches(steps, dtype):
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        images = torch.randn(GLOBAL_BATCH, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        yield images, torch.randint(0, CLASSES, (GLOBAL_BATCH,), generator=generator)


def serial(case, dtype):
    """Return the losses, the first gradients and the weights of one process."""
    network = make_network(dtype)
    optimizer = optim.Momentum(network.parameters(), 0.05, 0.9)
    losses, first = [], None
    for images, labels in batches(case.steps, dtype):
        loss = F.cross_entropy(network(images), labels)
        (loss * case.gradient_factor).backward()
        if first is None:
            first = {name: p.grad.clone() for name, p in network.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) * case.loss_factor)
    return losses, first, {name: p.detach() for name, p in network.named_parameters()}


def settings_of(given):
    save = given.get("save")
    if save == "policy":
        return {**given, "save": lambda operator: operator in (torch.ops.aten.linear.default,)}
    return {**given, "save": [getattr(torch.ops.aten, name) for name in save]} if save else given


def wrapped(case, network):
    """Return the network with its loss in the case's wrappers, all settings made."""
    for name, strategy in case.strategies.items():
        shard(network.get_submodule(name), strategy)
    for path, given in case.recompute.items():
        recompute(network.get_submodule(path), **settings_of(given))
    whole = WithLoss(network, F.cross_entropy)
    for kind, number in reversed(case.parts):
        whole = MicroBatchInterleaved(whole, number) if kind == "copies" else GradAccumulation(whole, number)
    return whole


def set_up(case, call):
    step = AutoParallel(call, compat=case.compat).dataset_strategy(case.dataset)
    if case.level:
        step.hsdp(shard_size=case.shard_size, threshold=0, optimizer_level=case.level)
    if case.comm_fusion is not None:
        step.comm_fusion(case.comm_fusion)
    if case.auto_limit_mb is not None:
        step.recompute("auto", memory_limit_mb=case.auto_limit_mb)
    return step


def part_of(tensor, case, rank):
    return tensor if case.dataset == "full_batch" else tensor.chunk(WORLD_SIZE)[rank]


def parallel(case, dtype, rank):
    """Return losses, first gradients, the network, its AutoParallel, and the collectives of the last step."""
    network = make_network(dtype)
    optimizer = optim.Momentum(network.parameters(), 0.05, 0.9)
    whole = wrapped(case, network)
    first, losses = {}, []
    data = [tuple(part_of(t, case, rank) for t in batch) for batch in batches(case.steps, dtype)]
    if case.form == "model":
        step = set_up(case, whole)
        monitor = Losses()
        Model(step, optimizer=optimizer).train(1, data, callbacks=monitor)
        return monitor.losses, None, network, step
    if case.form != "module":
        gradients_of = value_and_grad(lambda x, y: whole(x, y), None, list(network.parameters()))

        def train(x, y):
            if case.form == "fresh closures":

                def forward(x, y):
                    return whole(x, y)

                loss, gradients = value_and_grad(forward, None, list(network.parameters()))(x, y)
            else:
                loss, gradients = gradients_of(x, y)
            if not first:
                names = [name for name, _ in network.named_parameters()]
                first.update(zip(names, (local(g).clone() for g in gradients), strict=True))
            optimizer(gradients)
            return loss

        step = set_up(case, train)
    else:
        step = set_up(case, whole)
    for batch in data:
        traffic.reset()
        loss = step(*batch)
        if case.form == "module":
            (loss * 3 if case.scaled else loss).backward()
            if case.scaled:
                for parameter in network.parameters():
                    parameter.grad /= 3
            first = first or {name: local(p.grad).clone() for name, p in network.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, first, network, step


class Losses(LossMonitor):
    def __init__(self):
        super().__init__(0)
        self.losses = []

    def on_train_step_end(self, context):
        self.losses.append(context.loss)


def worst(mine, right, network, rank):
    """Return the largest difference of this rank's parts from the whole, relative to each tensor's largest value."""
    found = 0.0
    for name, parameter in network.named_parameters():
        shape, layout, mesh = find_placement(parameter)
        part = right[name][layout.slices(mesh, shape, rank)]
        assert mine[name].shape == part.shape, name
        found = max(found, float((mine[name] - part).abs().max() / right[name].abs().max()))
    return found


def law_of(case, dtype_name, rank):
    dtype = getattr(torch, dtype_name)
    right, gradients, weights = serial(case, dtype)
    losses, first, network, step = parallel(case, dtype, rank)
    moved = dict(traffic.calls)
    held = {name: local(p) for name, p in network.named_parameters()}
    return {
        "right": right,
        "losses": losses,
        "gradients": worst(first, gradients, network, rank) if first else 0.0,
        "weights": worst(held, weights, network, rank),
        "calls": moved,
        "captures": len(step._captured),
    }


def main():
    init(timeout_s=120)
    rank = get_rank()
    results = {}
    for case in CASES:
        for dtype_name in case.dtypes:
            if is_asked(f"{case.name}/{dtype_name}"):
                results[f"{case.name}/{dtype_name}"] = law_of(case, dtype_name, rank)
    whole = next(batches(1, torch.float64))
    mine = tuple(tensor.chunk(WORLD_SIZE)[rank] for tensor in whole)
    results["measures"] = step_measures.measure(make_network, mine, whole)
    torch.set_default_dtype(torch.float32)
    results["large"] = step_memory.measure()
    everyone = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, results)
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(everyone))
    release()


main()
