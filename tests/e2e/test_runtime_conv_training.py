"""Convolutional networks with batch norm train as in one process, running statistics included."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import slow_but
from local_parts import local, part_of
from on_ranks import Ranks, on_ranks
from torch import Tensor, nn

from msrun.runtime import (
    AutoParallel,
    MicroBatchInterleaved,
    WithLoss,
    no_init_parameters,
    shard,
)

WORLD_SIZE = 4
BATCH = 8
CLASSES = 6


class BasicBlock(nn.Module):
    """torchvision's: two 3x3 convolutions and a shortcut, with additions and activations in place."""

    def __init__(self, given: int, made: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(made)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(made)
        self.downsample = (
            nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made)) if stride > 1 else None
        )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's form, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Decoder(nn.Module):
    """Down and up again with a skip: pads, interpolates, transposes; keeps an average of its images besides."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(8, momentum=0.3, affine=False)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1)
        self.head = nn.Conv2d(7, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        given, x = x, x - self.center.view(3, 1, 1)
        with torch.no_grad():
            self.center.mul_(0.9).add_(given.mean((0, 2, 3)), alpha=0.1)
        small = F.silu(self.norm(self.down(x)))
        small = self.depthwise(F.interpolate(small, scale_factor=2.0))
        large = self.up(F.max_pool2d(small, 2))
        return F.adaptive_avg_pool2d(self.head(torch.cat([large, x], 1)), 1).flatten(1)


NETWORKS: dict[str, tuple[type[nn.Module], int]] = {
    "resnet": (ResNet, 32),
    "decoder": (Decoder, 16),
}
"""name -> class and size of its images"""

ROWS = ((1, 1, 4, 1), (1, 1, 1, 1))
SQUARES = ((1, 1, 2, 2), (1, 1, 1, 1))
OUTPUTS = ((1, 1, 1, 1), (4, 1, 1, 1))
INPUTS = ((1, 4, 1, 1), (1, 4, 1, 1))

ALL_ROWS = {
    "conv1": ROWS,
    "layer1.0.conv1": ROWS,
    "layer1.0.conv2": ROWS,
    "layer2.0.conv1": ROWS,
    "layer2.0.conv2": ROWS,
    "layer2.0.downsample.0": ROWS,
}
CHANNELS = {
    "conv1": OUTPUTS,
    "layer1.0.conv1": INPUTS,
    "layer1.0.conv2": OUTPUTS,
    "layer2.0.conv1": INPUTS,
    "layer2.0.conv2": OUTPUTS,
    "layer2.0.downsample.0": OUTPUTS,
}
MIXED = {
    "conv1": ((2, 1, 2, 1), (1, 1, 1, 1)),
    "bn1": ((1, 4, 1, 1), (4,), (4,)),
    "maxpool": ((2, 2, 1, 1),),
    "layer1.0.conv1": SQUARES,
    "layer1.0.bn2": ((4, 1, 1, 1),),
    "layer1.0.conv2": ((2, 2, 1, 1), (1, 2, 1, 1)),
    "layer2.0.conv1": ((1, 1, 2, 1), (2, 1, 1, 1)),
    "layer2.0.downsample.0": ((1, 2, 1, 2), (1, 2, 1, 1)),
    "avgpool": ((1, 1, 2, 2),),
    "fc": ((1, 2), (2, 2), (2,)),
}


@dataclass(frozen=True)
class Scenario:
    """One way."""

    name: str
    network: str = "resnet"
    strategies: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1
    hsdp: Mapping[str, Any] | None = None
    full_batch: bool = True
    deferred: bool = False
    steps: int = 5
    dtype: str = "float64"


HSDP = {"threshold": 0, "optimizer_level": "level3"}

SCENARIOS = [
    Scenario("data-parallel", full_batch=False),
    Scenario("data-parallel-float32", full_batch=False, dtype="float32", steps=3),
    Scenario("channels", strategies=CHANNELS),
    Scenario("rows", strategies=ALL_ROWS),
    Scenario("mixed", strategies=MIXED),
    Scenario("two-copies", copies=2, full_batch=False),
    Scenario("mixed-two-copies-hsdp", strategies=MIXED, copies=2, hsdp=HSDP, deferred=True, steps=5),
    Scenario(
        "decoder-cut",
        "decoder",
        {
            "down": OUTPUTS,
            "norm": ((2, 1, 2, 1),),
            "depthwise": ((1, 2, 2, 1), (2, 1, 1, 1)),
            "up": ((1, 1, 4, 1), (1, 1, 1, 1)),
            "head": ((2, 1, 1, 2), (1, 1, 1, 1)),
        },
        copies=2,
        steps=3,
    ),
]


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


TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def serial(scenario):
    """Return the losses of one process, and its network after training."""
    network, optimizer, whole = make(scenario)
    return train(scenario, network, optimizer, whole, lambda tensor: in_copies(scenario, tensor)), network


@on_ranks(WORLD_SIZE)
@pytest.mark.parametrize("scenario", slow_but(["decoder-cut"], SCENARIOS))
def test_losses_weights_and_running_statistics_are_those_of_one_process(ranks: Ranks, scenario: Scenario) -> None:
    """The last loss is that of evaluation."""
    right, alone = serial(scenario)
    with no_init_parameters() if scenario.deferred else nullcontext():
        network, optimizer, whole = make(scenario)
    for path, strategy in scenario.strategies.items():
        shard(network.get_submodule(path), strategy)
    step = AutoParallel(whole)
    if scenario.full_batch:
        step.dataset_strategy("full_batch")
    if scenario.hsdp is not None:
        step.hsdp(**scenario.hsdp)
    losses = train(scenario, network, optimizer, step, (lambda t: t) if scenario.full_batch else ranks.part)
    tolerance = TOLERANCE[scenario.dtype]
    assert losses == pytest.approx(right, rel=tolerance, abs=0)
    assert len(losses) == scenario.steps + 1 and right[scenario.steps - 1] != right[0]
    for mine, other in zip(network.parameters(), alone.parameters(), strict=True):
        assert relative(local(mine), part_of(other, mine)) <= tolerance
    buffers = dict(network.named_buffers())
    assert buffers
    assert all(relative(v.double(), alone.get_buffer(name).double()) <= tolerance for name, v in buffers.items())
    counted = {int(value) for name, value in buffers.items() if name.endswith("num_batches_tracked")}
    assert counted == {scenario.steps * scenario.copies}
    if scenario.strategies is MIXED:
        assert {o.module_path for o in step.plan.operators if o.origin == "user"} == set(MIXED)
        assert not step.plan.notes
    if scenario.strategies is ALL_ROWS:
        check_rows(step.plan.operators)


def check_rows(operators):
    """The cut space goes through the whole network."""
    numbers = [o.strategy[0] for o in operators if o.strategy]
    of_space = [each for each in numbers if len(each) == 4]
    assert of_space == [(1, 1, 4, 1)] * (len(of_space) - 1) + [(4, 1, 1, 1)], "flatten comes after the average"
    assert {o.module_path.removeprefix("network.") for o in operators if o.origin == "user"} == set(ALL_ROWS)


@pytest.mark.slow
@on_ranks(WORLD_SIZE)
def test_gradients_in_float32_are_as_near_to_float64_as_those_of_one_process() -> None:
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
    one, everyone = (float(torch.tensor(errors[who]).median()) for who in ("one", "all"))
    assert 0 < everyone < 1.5 * one < 1e-5
