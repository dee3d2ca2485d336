"""Transforms of images, with MindSpore's names and arithmetic.

Each works on a batch (N, H, W, C) of any real dtype, or on one image (H, W, C) when called. Inside a pipeline they
run vectorised, the random ones with draws that belong to the sample: see `draws`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from msrun.errors import UsageError
from msrun.runtime.data.draws import SampleDraws
from msrun.runtime.data.operations import RandomTransform, Transform
from msrun.runtime.data.parameters import parse_counts


class Rescale(Transform):
    """image * rescale + shift, in float32; any shape."""

    def __init__(self, rescale: float, shift: float) -> None:
        self._rescale = np.float32(rescale)
        self._shift = np.float32(shift)

    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        scaled = batch.astype(np.float32)
        scaled *= self._rescale
        scaled += self._shift
        return scaled


class Normalize(Transform):
    """(image - mean) / std per channel, in float32; `is_hwc` False takes (N, C, H, W).

    Raises:
        UsageError: `mean` and `std` differ in length, a std is not positive, or (when applied) the images have
            another number of channels.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], is_hwc: bool = True) -> None:
        self._mean = np.asarray(mean, np.float32).reshape(-1)
        self._std = np.asarray(std, np.float32).reshape(-1)
        if len(self._mean) != len(self._std) or len(self._mean) == 0:
            raise UsageError(f"Normalize: mean={mean!r} and std={std!r}; give one value per channel in both")
        if not (self._std > 0).all():
            raise UsageError(f"Normalize: std={std!r}; every value must be greater than 0")
        self._is_hwc = is_hwc

    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        _check_images("Normalize", batch)
        axis = 3 if self._is_hwc else 1
        if len(self._mean) not in (1, batch.shape[axis]):
            raise UsageError(
                f"Normalize: mean and std have {len(self._mean)} values, images of shape {batch.shape[1:]} with "
                f"is_hwc={self._is_hwc} have {batch.shape[axis]} channels; give one value per channel"
            )
        per_channel = (-1,) if self._is_hwc else (-1, 1, 1)
        normalized = batch.astype(np.float32)
        normalized -= self._mean.reshape(per_channel)
        normalized /= self._std.reshape(per_channel)
        return normalized


class HWC2CHW(Transform):
    """(N, H, W, C) -> (N, C, H, W), same dtype."""

    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        _check_images("HWC2CHW", batch)
        return np.ascontiguousarray(batch.transpose(0, 3, 1, 2))


class Resize(Transform):
    """Bilinear resize to (height, width) pixels, pixel centres at halves, no antialiasing.

    One integer is the length of the shorter edge; the other edge keeps the ratio. Integer images are rounded and
    keep their dtype, others become float32.

    Raises:
        UsageError: a size below 1 or of another form.
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        self._size = parse_counts("Resize: size", size, lengths=(1, 2), minimum=1)

    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        _check_images("Resize", batch)
        pixels = torch.from_numpy(np.ascontiguousarray(batch.transpose(0, 3, 1, 2), np.float32))
        resized = F.interpolate(pixels, self._target_size(batch.shape[1:3]), mode="bilinear", align_corners=False)
        images = resized.numpy().transpose(0, 2, 3, 1)
        if np.issubdtype(batch.dtype, np.integer):
            images = np.rint(images).astype(batch.dtype)
        return np.ascontiguousarray(images)

    def _target_size(self, source_size: tuple[int, ...]) -> list[int]:
        if len(self._size) == 2:
            return list(self._size)
        shorter = min(source_size)
        return [max(1, int(edge * self._size[0] / shorter)) for edge in source_size]


class RandomCrop(RandomTransform):
    """Pad with zeros, then cut a window of `size` pixels at a random place; the dtype stays.

    `size` is (height, width) or one integer for a square; `padding` is (left, top, right, bottom), (left and right,
    top and bottom) or one integer for all sides.

    Raises:
        UsageError: a size below 1, a negative padding, or (when applied) a window larger than the padded image.
    """

    def __init__(self, size: int | Sequence[int], padding: int | Sequence[int] = 0) -> None:
        sizes = parse_counts("RandomCrop: size", size, lengths=(1, 2), minimum=1)
        self._height, self._width = sizes[0], sizes[-1]
        sides = parse_counts("RandomCrop: padding", padding, lengths=(1, 2, 4), minimum=0)
        self._left, self._top, self._right, self._bottom = sides * (4 // len(sides))

    def apply_random_batch(self, batch: np.ndarray, draws: SampleDraws) -> np.ndarray:
        _check_images("RandomCrop", batch)
        edges = ((0, 0), (self._top, self._bottom), (self._left, self._right), (0, 0))
        padded = np.pad(batch, edges)
        num_tops = padded.shape[1] - self._height + 1
        num_lefts = padded.shape[2] - self._width + 1
        if num_tops < 1 or num_lefts < 1:
            raise UsageError(
                f"RandomCrop: a window of {(self._height, self._width)} does not fit the padded image of "
                f"{padded.shape[1:3]}; use a smaller size or more padding"
            )
        rows = draws.integers(0, num_tops)[:, None] + np.arange(self._height)
        columns = draws.integers(1, num_lefts)[:, None] + np.arange(self._width)
        return padded[np.arange(len(batch))[:, None, None], rows[:, :, None], columns[:, None, :]]


class RandomHorizontalFlip(RandomTransform):
    """Mirror left and right with probability `prob`.

    Raises:
        UsageError: `prob` is not in 0..1.
    """

    def __init__(self, prob: float = 0.5) -> None:
        if not 0 <= prob <= 1:
            raise UsageError(f"RandomHorizontalFlip: prob={prob!r}; it must be in 0..1")
        self._prob = prob

    def apply_random_batch(self, batch: np.ndarray, draws: SampleDraws) -> np.ndarray:
        _check_images("RandomHorizontalFlip", batch)
        is_flipped = draws.uniform(0) < self._prob
        return np.where(is_flipped[:, None, None, None], batch[:, :, ::-1], batch)


def _check_images(name: str, batch: np.ndarray) -> None:
    if batch.ndim != 4:
        raise UsageError(f"{name}: needs images with 3 axes (height, width, channel), got shape {batch.shape[1:]}")
