"""Readers of data under MindSpore's path; see `msrun.runtime.data`."""

from __future__ import annotations

from msrun.mindspore.dataset import transforms, vision
from msrun.runtime.data import (
    Cifar10Dataset,
    Cifar100Dataset,
    GeneratorDataset,
    MnistDataset,
    NumpySlicesDataset,
    config,
)

__all__ = [
    "Cifar10Dataset",
    "Cifar100Dataset",
    "GeneratorDataset",
    "MnistDataset",
    "NumpySlicesDataset",
    "config",
    "transforms",
    "vision",
]
