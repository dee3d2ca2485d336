"""Transforms of images under MindSpore's paths; see `msrun.runtime.data.vision`."""

from __future__ import annotations

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
)

__all__ = [
    "HWC2CHW",
    "CenterCrop",
    "Inter",
    "Normalize",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Rescale",
    "Resize",
    "ToTensor",
]
