"""Blocks of images."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from random_networks.blocks import Block
from random_networks.case import CHANNELS

IMAGES = ("images",)


class ImageBlock(Block):
    families = IMAGES
    weight = 0
    is_learnt = False


class Conv(ImageBlock):
    weight = 6
    cuts: ClassVar[dict[str, str]] = {"conv": "conv"}

    def __init__(self, family, groups, channels_last):
        super().__init__(family)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=groups)
        self.channels_last = channels_last
        if channels_last:
            self.conv = self.conv.to(memory_format=torch.channels_last)

    @classmethod
    def options(cls, rng):
        return {"groups": rng.choice([1, 1, 2, CHANNELS]), "channels_last": rng.random() < 0.5}

    def forward(self, x):
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return torch.tanh(self.written("conv", self.conv(x)))


class ConvTaken(ImageBlock):
    weight = 3

    def build(self):
        self.conv = nn.Conv2d(CHANNELS, 2 * CHANNELS, 1)

    def forward(self, x):
        a, b = self.conv(x).chunk(2, 1)
        return a * torch.sigmoid(b)


class BatchNorm2d(ImageBlock):
    weight = 5
    crosses_rows = True

    def __init__(self, family, momentum):
        super().__init__(family)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS, momentum=momentum)

    @classmethod
    def options(cls, rng):
        return {"momentum": None if rng.random() < 0.05 else 0.1}

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Pool(ImageBlock):
    weight = 4
    ways: ClassVar[Any] = {
        "max": lambda s, x: F.max_pool2d(x, 3, 1, 1),
        "average": lambda s, x: F.avg_pool2d(x, 3, 1, 1),
        "down_up": lambda s, x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="nearest"),
        "squeeze": lambda s, x: x * torch.sigmoid(F.adaptive_avg_pool2d(x, 1)),
        "shuffle": lambda s, x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
        "group": lambda s, x: F.group_norm(x, 2),
    }


class Transposed(ImageBlock):
    def build(self):
        self.down = nn.Conv2d(CHANNELS, CHANNELS, 2, stride=2)
        self.up = nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, stride=2)

    def forward(self, x):
        return self.up(torch.tanh(self.down(x)))
