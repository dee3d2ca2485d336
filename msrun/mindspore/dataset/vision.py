"""Transforms of images under MindSpore's paths; see `msrun.data.vision`."""

from __future__ import annotations

from enum import Enum

import numpy as np

from msrun.data import vision
from msrun.mindspore.import_paths import take_names
from msrun.mindspore.missing import missing_names

_OF_RUNTIME = """
HWC2CHW CenterCrop Inter Normalize RandomCrop RandomHorizontalFlip RandomResizedCrop RandomVerticalFlip Rescale Resize
ToTensor
"""
__all__ = [*take_names(__name__, vision, _OF_RUNTIME), "SliceMode", "SlicePatches"]
__getattr__ = missing_names("dataset.vision", __all__)


class SliceMode(Enum):
    """What happens to an image whose sides are no multiples: zeros are added, or rows and columns left out."""

    PAD, DROP = 0, 1


class SlicePatches:
    """Cut an image (H, W, ...) into num_height x num_width equal patches, one column each, row after row."""

    def __init__(
        self, num_height: int = 1, num_width: int = 1, slice_mode: SliceMode = SliceMode.PAD, fill_value: int = 0
    ) -> None:
        self._numbers, self._mode, self._value = (num_height, num_width), slice_mode, fill_value

    def __call__(self, image: np.ndarray) -> tuple[np.ndarray, ...]:
        image = np.asarray(image)
        surplus = [-side % number for side, number in zip(image.shape, self._numbers, strict=False)]
        if self._mode is SliceMode.PAD:
            edges = [(0, one) for one in surplus] + [(0, 0)] * (image.ndim - 2)
            image = np.pad(image, edges, constant_values=self._value)
        height, width = (side // number for side, number in zip(image.shape, self._numbers, strict=False))
        return tuple(
            image[row * height : (row + 1) * height, column * width : (column + 1) * width]
            for row in range(self._numbers[0])
            for column in range(self._numbers[1])
        )
