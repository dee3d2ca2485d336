"""Readers of MNIST and CIFAR, their transforms, and loading that is split over the ranks of the job.

    from msrun.data import MnistDataset, transforms, vision

Whatever the number of ranks, step k of an epoch sees the same global batch: the blocks that the ranks read, put one
after the other, are batch k of a single process with the batch size multiplied by the number of ranks.

Names are loaded at first use: importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msrun.data import config, transforms, vision
    from msrun.data.cifar import Cifar10Dataset, Cifar100Dataset
    from msrun.data.criteo import CriteoDataset, write_clicks
    from msrun.data.dataset import Dataset, GeneratorDataset, NumpySlicesDataset
    from msrun.data.digits import write_digits, write_digits_as_cifar10
    from msrun.data.mnist import MnistDataset, read_idx, write_idx
    from msrun.errors import DataError

__all__ = [
    "Cifar10Dataset",
    "Cifar100Dataset",
    "CriteoDataset",
    "DataError",
    "Dataset",
    "GeneratorDataset",
    "MnistDataset",
    "NumpySlicesDataset",
    "config",
    "read_idx",
    "transforms",
    "vision",
    "write_clicks",
    "write_digits",
    "write_digits_as_cifar10",
    "write_idx",
]

_MODULE_OF_NAME = {
    "Cifar10Dataset": "msrun.data.cifar",
    "Cifar100Dataset": "msrun.data.cifar",
    "CriteoDataset": "msrun.data.criteo",
    "DataError": "msrun.errors",
    "Dataset": "msrun.data.dataset",
    "GeneratorDataset": "msrun.data.dataset",
    "MnistDataset": "msrun.data.mnist",
    "NumpySlicesDataset": "msrun.data.dataset",
    "read_idx": "msrun.data.mnist",
    "write_clicks": "msrun.data.criteo",
    "write_digits": "msrun.data.digits",
    "write_digits_as_cifar10": "msrun.data.digits",
    "write_idx": "msrun.data.mnist",
}
_MODULES = ("config", "transforms", "vision")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _MODULE_OF_NAME:
        value = getattr(import_module(_MODULE_OF_NAME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
