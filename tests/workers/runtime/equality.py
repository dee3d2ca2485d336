"""Trains one network in every way of equality_scenarios and, on this very process, without any parallelism.

usage: equality.py RESULT.json
"""

import functools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from equality_scenarios import GLOBAL_BATCH, SCENARIOS, SIZES, WORLD_SIZE
from local_parts import local
from only_cases import is_asked
from torch import nn

from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    WithLoss,
    get_rank,
    init,
    no_init_parameters,
    optim,
    release,
    set_comm_fusion,
    shard,
    value_and_grad,
)
from msrun.runtime.execute.transfers import traffic

OPTIMIZERS = {
    "momentum": lambda p: optim.Momentum(p, 0.05, 0.9),
    "adam": lambda p: optim.Adam(p, lr=1e-3),
    "torch-adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "torch-adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "torch-sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(SIZES[0], SIZES[1])
        self.layer2 = nn.Linear(SIZES[1], SIZES[2])
        self.layer3 = nn.Linear(SIZES[2], SIZES[3])

    def forward(self, x):
        return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))


def make_network(dtype):
    torch.manual_seed(1)
    torch.set_default_dtype(dtype)
    return Network()


@functools.cache
def batches(steps, dtype):
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(steps):
        images = torch.randn(GLOBAL_BATCH, SIZES[0], generator=generator, dtype=torch.float64).to(dtype)
        found.append((images, torch.randint(0, SIZES[-1], (GLOBAL_BATCH,), generator=generator)))
    return found


@functools.cache
def serial(optimizer_name, factor, steps, dtype):
    """Return losses and weights of one process, whose loss is `factor` times the mean."""
    network = make_network(dtype)
    optimizer = OPTIMIZERS[optimizer_name](network.parameters())
    losses = []
    for images, labels in batches(steps, dtype):
        loss = F.cross_entropy(network(images), labels) * factor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, dict(network.named_parameters())


def part_of(tensor, scenario, rank):
    """Return what a rank passes."""
    if scenario.dataset == "full_batch":
        return tensor
    parts, index = WORLD_SIZE, rank
    if scenario.dataset != "data_parallel":
        parts = scenario.dataset[0][0]
        index = rank * parts // WORLD_SIZE
    return tensor.chunk(parts)[index]


def parallel(scenario, dtype, rank):
    """Return losses, the network, its AutoParallel, its optimizer, and the collectives of the last step."""
    if scenario.deferred:
        with no_init_parameters():
            network = make_network(dtype)
            optimizer = OPTIMIZERS[scenario.optimizer](network.parameters())
    else:
        network = make_network(dtype)
        optimizer = OPTIMIZERS[scenario.optimizer](network.parameters())
    for name, strategy in scenario.strategies.items():
        shard(getattr(network, name), strategy)
    for name, number in scenario.fusion.items():
        set_comm_fusion(getattr(network, name), number)
    whole = WithLoss(network, F.cross_entropy)
    if scenario.copies > 1:
        whole = MicroBatchInterleaved(whole, scenario.copies)
    if scenario.form == "step":
        gradients_of = value_and_grad(lambda x, y: whole(x, y), None, list(network.parameters()))

        def train(images, labels):
            loss, gradients = gradients_of(images, labels)
            optimizer(gradients)
            return loss
    else:
        train = whole
    step = AutoParallel(train, scenario.mode, compat=scenario.compat)
    if scenario.mode == "semi_auto":
        step.dataset_strategy(scenario.dataset)
    if scenario.weights_late:
        step.transformer_opt({"grad_matmul_communication_overlap": True})
    if scenario.hsdp is not None:
        step.hsdp(**scenario.hsdp)
    losses = []
    for images, labels in batches(scenario.steps, dtype):
        traffic.reset()
        loss = step(part_of(images, scenario, rank), part_of(labels, scenario, rank))
        if scenario.form == "module":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, network, step, optimizer, {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes)}


def weight_difference(network, step, right, rank):
    """Return the largest difference of this rank's parts from one process, relative to each weight's largest value."""
    worst = 0.0
    stored = {}
    if step._compilations:
        storage = next(iter(step._compilations.values())).storage
        stored = {id(item.parameter): item for item in storage.stored.values()}
    for name, parameter in network.named_parameters():
        whole = right[name].detach()
        if stored:
            item = stored[id(parameter)]
            whole = whole[item.placement.slices]
        assert local(parameter).shape == whole.shape, name
        worst = max(worst, float((local(parameter) - whole).abs().max() / right[name].detach().abs().max()))
    return worst


def state_bytes(optimizer):
    return {
        index: sum(local(v).nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
        for index, state in enumerate(optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    }


class MatMul(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x @ self.weight


def published_losses():
    """Return the losses of MindSpore's functional_train.py, which publishes its second one."""
    torch.set_default_dtype(torch.float32)
    first = MatMul(torch.full((32, 8), 0.03))
    second = MatMul(torch.full((8, 16), 0.04))
    network = nn.Sequential(first, nn.ReLU(), second)
    shard(first, ((2, 4), (4, 1)))
    shard(second, ((2, 4), (4, 1)))
    optimizer = optim.Momentum(network.parameters(), learning_rate=0.3, momentum=0.1)
    gradients_of = value_and_grad(lambda x, y: F.mse_loss(network(x), y), None, list(network.parameters()))

    def train(x, y):
        loss, gradients = gradients_of(x, y)
        optimizer(gradients)
        return loss

    step = AutoParallel(train).dataset_strategy("full_batch").hsdp(threshold=0)
    inputs = torch.full((16, 32), 0.1), torch.full((16, 16), 0.1)
    return [float(step(*inputs)) for _ in range(3)], step.plan.to_json()


def main():
    init(timeout_s=120)
    rank = get_rank()
    results = {}
    for scenario in SCENARIOS:
        for dtype_name in scenario.dtypes:
            if not is_asked(f"{scenario.name}/{dtype_name}"):
                continue
            dtype = getattr(torch, dtype_name)
            factor = scenario.copies if scenario.compat == "mindspore" else 1  # copies are added up
            right, weights = serial(scenario.optimizer, factor, scenario.steps, dtype)
            losses, network, step, optimizer, moved = parallel(scenario, dtype, rank)
            mine = {
                "losses": losses,
                "difference": weight_difference(network, step, weights, rank),
                "state_bytes": state_bytes(optimizer),
            }
            everyone = [None] * WORLD_SIZE
            dist.all_gather_object(everyone, mine)
            results[f"{scenario.name}/{dtype_name}"] = {
                "right": right,
                "ranks": everyone,
                "traffic": moved,
                "plan": step.plan.to_json() if scenario.mode == "semi_auto" else None,
                "explain": step.plan.explain() if scenario.mode == "semi_auto" else None,
            }
    if is_asked("published"):
        losses, plan = published_losses()
        results["published"] = {"losses": losses, "plan": plan}
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    release()


main()
