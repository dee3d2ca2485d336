"""Readers of data under MindSpore's path; see `msrun.data`."""

from __future__ import annotations

from msrun import data
from msrun.mindspore.dataset import transforms, vision
from msrun.mindspore.import_paths import take_names
from msrun.mindspore.missing import missing_names

_OF_RUNTIME = "Cifar10Dataset Cifar100Dataset GeneratorDataset MnistDataset NumpySlicesDataset config"
__all__ = [*take_names(__name__, data, _OF_RUNTIME), "transforms", "vision"]
__getattr__ = missing_names("dataset", __all__)
