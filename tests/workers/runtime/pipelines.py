"""Trains one network through every pipeline of pipeline_scenarios for this world and, here, without any parallelism.

usage: pipelines.py RESULT.json
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from local_parts import local
from only_cases import is_asked
from pipeline_scenarios import BLOCKS, CLASSES, GLOBAL_BATCH, SCENARIOS, STEPS, WIDTH
from torch import nn

from msrun.runtime import (
    AutoParallel,
    LossMonitor,
    MicroBatchInterleaved,
    Model,
    Pipeline,
    WithLoss,
    get_group_size,
    get_rank,
    init,
    no_init_parameters,
    optim,
    release,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

OPTIMIZERS = {"momentum": lambda p: optim.Momentum(p, 0.05, 0.9), "adam": lambda p: optim.Adam(p, lr=3e-3)}


class Network(nn.Module):
    def __init__(self, scenario):
        super().__init__()
        self.first = nn.Linear(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(BLOCKS)
        )
        self.last = nn.Linear(WIDTH, CLASSES)
        self.unused = nn.Linear(1, 1)
        if scenario.tied:
            self.last.weight = None
        self.skips = scenario.skips

    def forward(self, x):
        first = h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
            if self.skips:
                h = h + 0.25 * first
        if self.last.weight is None:
            return h @ self.first.weight + self.last.bias
        return self.last(h)


def loss_of(scores, labels):
    smooth = 0.9 * F.one_hot(labels, CLASSES).to(scores.dtype) + 0.1 / CLASSES  # of labels alone: in the last stage
    return F.cross_entropy(scores, smooth)


def make_network(scenario, dtype):
    torch.manual_seed(1)
    torch.set_default_dtype(dtype)
    return Network(scenario)


def batches(dtype):
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        x = torch.randn(GLOBAL_BATCH, CLASSES, generator=generator, dtype=torch.float64).to(dtype)
        yield x, torch.randint(0, CLASSES, (GLOBAL_BATCH,), generator=generator)


def serial(scenario, dtype):
    """Return losses and weights of one process; sums are that many times the mean loss."""
    network = make_network(scenario, dtype)
    optimizer = OPTIMIZERS[scenario.optimizer](network.parameters())
    copies, parts = (scenario.copies, scenario.micro_size) if scenario.compat == "mindspore" else (1, 1)
    losses = []
    for x, labels in batches(dtype):
        loss = loss_of(network(x), labels)
        (loss * copies).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) * copies * parts)
    return losses, dict(network.named_parameters())


def part_of(tensor, scenario, rank):
    if scenario.dataset == "full_batch":
        return tensor
    return tensor.chunk(scenario.stage_size)[rank % scenario.stage_size]


class Losses(LossMonitor):
    def __init__(self):
        super().__init__(0)
        self.losses = []

    def on_train_step_end(self, context):
        self.losses.append(context.loss)


def parallel(scenario, dtype, rank):
    """Return losses, the network, its AutoParallel, and the messages of the last step."""
    if scenario.deferred:
        with no_init_parameters():
            network = make_network(scenario, dtype)
            optimizer = OPTIMIZERS[scenario.optimizer](network.parameters())
    else:
        network = make_network(scenario, dtype)
        optimizer = OPTIMIZERS[scenario.optimizer](network.parameters())
    for name, strategy in scenario.strategies.items():
        shard(network.get_submodule(name), strategy)
    whole = WithLoss(network, loss_of)
    if scenario.copies > 1:
        whole = MicroBatchInterleaved(whole, scenario.copies)
    whole = Pipeline(whole, scenario.micro_size, scenario.stage_config)
    if scenario.form == "step":
        gradients_of = value_and_grad(lambda x, y: whole(x, y), None, list(network.parameters()))

        def train(x, labels):
            loss, gradients = gradients_of(x, labels)
            optimizer(gradients)
            return loss
    else:
        train = whole
    step = AutoParallel(train, compat=scenario.compat).dataset_strategy(scenario.dataset)
    step.pipeline(scenario.stages, scenario.scheduler, scenario.interleave)
    if scenario.weights_late:
        step.transformer_opt({"grad_matmul_communication_overlap": True})
    if scenario.hsdp is not None:
        step.hsdp(**scenario.hsdp)
    data = [(part_of(x, scenario, rank), part_of(labels, scenario, rank)) for x, labels in batches(dtype)]
    if scenario.form == "model":
        monitor = Losses()
        Model(step, optimizer=optimizer).train(1, data, monitor)
        return monitor.losses, network, step, None
    losses = []
    for x, labels in data:
        traffic.reset()
        loss = step(x, labels)
        if scenario.form == "module":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, network, step, {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes)}


def compare_weights(network, step, right, rank):
    """Return the largest relative difference of this rank's parts from one process, and the names of held ones."""
    storage = next(iter(step._compilations.values())).storage
    stored = {id(item.parameter): item for item in storage.stored.values()}
    worst, held = 0.0, []
    for name, parameter in network.named_parameters():
        if not local(parameter).numel():
            assert local(parameter).shape[0] == 0, name
            continue
        held.append(name)
        whole = right[name].detach()
        item = stored[id(parameter)]
        part = whole[item.placement.slices]
        assert local(parameter).shape == part.shape, name
        worst = max(worst, float((local(parameter) - part).abs().max() / whole.abs().max()))
    return worst, held


def main():
    init(timeout_s=120)
    rank = get_rank()
    results = {}
    for scenario in SCENARIOS:
        for dtype_name in scenario.dtypes if scenario.world_size == get_group_size() else ():
            if not is_asked(f"{scenario.name}/{dtype_name}"):
                continue
            dtype = getattr(torch, dtype_name)
            right, weights = serial(scenario, dtype)
            losses, network, step, moved = parallel(scenario, dtype, rank)
            difference, held = compare_weights(network, step, weights, rank)
            mine = {"losses": losses, "difference": difference, "held": held, "traffic": moved}
            everyone = [None] * get_group_size()
            dist.all_gather_object(everyone, mine)
            plan = step.plan
            results[f"{scenario.name}/{dtype_name}"] = {
                "right": right,
                "ranks": everyone,
                "plan": plan.to_json(),
                "explain": plan.explain(),
                "text": plan.schedule_text(),
            }
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    release()


main()
