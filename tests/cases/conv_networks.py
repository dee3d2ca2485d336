"""Convolutional networks and the ways to train them that must all give the numbers of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

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


class SmoothResNet(ResNet):
    """Without the places where the least rounding may turn a gradient on or off: ReLU at 0, equal values in a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.maxpool = nn.AvgPool2d(3, 2, 1)
        for module in self.modules():
            if isinstance(module, ResNet | BasicBlock):
                module.relu = nn.SiLU(inplace=True)


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 5)
        self.conv2 = nn.Conv2d(4, 8, 5, padding=2)
        self.norm = nn.GroupNorm(2, 8)
        self.fc1 = nn.Linear(8 * 7 * 7, 16)
        self.fc2 = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.avg_pool2d(F.relu(self.norm(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.view(x.shape[0], -1))))


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
    "smooth-resnet": (SmoothResNet, 32),
    "lenet": (LeNet, 32),
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
    Scenario("smooth-float32", "smooth-resnet", full_batch=False, dtype="float32"),
    Scenario("channels", strategies=CHANNELS),
    Scenario("rows", strategies=ALL_ROWS),
    Scenario("mixed", strategies=MIXED),
    Scenario("two-copies", copies=2, full_batch=False),
    Scenario("mixed-two-copies-hsdp", strategies=MIXED, copies=2, hsdp=HSDP, deferred=True, steps=5),
    Scenario(
        "lenet-cut",
        "lenet",
        {"conv1": ROWS, "conv2": OUTPUTS, "fc1": ((1, 1), (4, 1)), "fc2": ((1, 4), (1, 4))},
        steps=3,
    ),
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
