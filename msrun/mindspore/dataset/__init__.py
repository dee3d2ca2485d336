"""Readers of data under MindSpore's path; see `msrun.runtime.data`."""

from __future__ import annotations

from typing import Any

from msrun.mindspore.dataset import transforms, vision
from msrun.mindspore.missing import missing_name
from msrun.runtime.data import (
    Cifar10Dataset,
    Cifar100Dataset,
    GeneratorDataset,
    MnistDataset,
    NumpySlicesDataset,
    config,
)

__all__ = [
    "Cifar10Dataset", "Cifar100Dataset", "GeneratorDataset", "MnistDataset", "NumpySlicesDataset", "config",
    "transforms", "vision",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    raise missing_name("dataset", name, __all__)
