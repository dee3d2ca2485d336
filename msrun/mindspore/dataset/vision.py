"""Transforms of images under MindSpore's paths; see `msrun.runtime.data.vision`."""

from __future__ import annotations

from typing import Any

from msrun.mindspore.missing import missing_name
from msrun.runtime.data.vision import (
    HWC2CHW,
    CenterCrop,
    Inter,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Rescale,
    Resize,
    ToTensor,
)  # fmt: skip

__all__ = [
    "HWC2CHW", "CenterCrop", "Inter", "Normalize", "RandomCrop", "RandomHorizontalFlip", "RandomResizedCrop",
    "RandomVerticalFlip", "Rescale", "Resize", "ToTensor",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    raise missing_name("dataset.vision", name, __all__)
