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

_HOMES = {
    "data.cifar": "Cifar10Dataset Cifar100Dataset",
    "data.criteo": "CriteoDataset write_clicks",
    "data.dataset": "Dataset GeneratorDataset NumpySlicesDataset",
    "data.digits": "write_digits write_digits_as_cifar10",
    "data.mnist": "MnistDataset read_idx write_idx",
    "errors": "DataError",
}
_HOME_OF = {name: f"msrun.{home}" for home, names in _HOMES.items() for name in names.split()}
_MODULES = ("config", "transforms", "vision")

__all__ = ["Cifar10Dataset", "Cifar100Dataset", "CriteoDataset", "DataError", "Dataset"]  # what type checkers see
__all__ += ["GeneratorDataset", "MnistDataset", "NumpySlicesDataset", "config", "read_idx", "transforms", "vision"]
__all__ += ["write_clicks", "write_digits", "write_digits_as_cifar10", "write_idx"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _HOME_OF:
        value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
