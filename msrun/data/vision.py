"""Transforms of images, with MindSpore's names and arithmetic.

Each works on a batch (N, H, W, C) of any real dtype, or on one image (H, W, C) when called. Inside a pipeline they
run vectorised, the random ones with draws that belong to the sample: see `draws`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from msrun.data.config import parse_count, parse_counts
from msrun.data.order import SampleDraws
from msrun.data.source import RandomTransform, Transform
from msrun.errors import UsageError


class Rescale(Transform):
    """image * rescale + shift, in float32; any shape."""

    def __init__(self, rescale: float, shift: float) -> None:
        self._rescale = np.float32(rescale)
        self._shift = np.float32(shift)

    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        scaled = np.multiply(batch, self._rescale, dtype=np.float32)
        if self._shift:
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
        normalized = np.subtract(batch, self._mean.reshape(per_channel), dtype=np.float32)
        normalized /= self._std.reshape(per_channel)
        return normalized


class HWC2CHW(Transform):
    """(N, H, W, C) -> (N, C, H, W), same dtype."""

    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        _check_images("HWC2CHW", batch)
        return np.ascontiguousarray(batch.transpose(0, 3, 1, 2))


class ToTensor(Transform):
    """(N, H, W, C) -> (N, C, H, W) in float32, divided by 255: Rescale(1 / 255, 0) and HWC2CHW."""

    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        return HWC2CHW().apply_batch(Rescale(1 / 255, 0).apply_batch(batch))


class Inter(Enum):
    """How pixels between pixels are made."""

    NEAREST = "nearest"
    LINEAR = BILINEAR = "linear"


class Resize(Transform):
    """Resize to (height, width) pixels: bilinear, pixel centres at halves, no antialiasing; or the nearest pixel.

    One integer is the length of the shorter edge; the other edge keeps the ratio. Integer images are rounded and
    keep their dtype, others become float32. As `torch.nn.functional.interpolate`, and the same bits on every machine,
    which that does not promise.

    Raises:
        UsageError: a size below 1 or of another form, or another interpolation.
    """

    def __init__(self, size: int | Sequence[int], interpolation: Inter = Inter.LINEAR) -> None:
        self._size = parse_counts("Resize: size", size, lengths=(1, 2), minimum=1)
        if not isinstance(interpolation, Inter):
            raise UsageError(f"Resize: interpolation={interpolation!r}; give Inter.LINEAR or Inter.NEAREST")
        self._interpolation = interpolation

    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        _check_images("Resize", batch)
        source_size, size = batch.shape[1:3], self._target_size(batch.shape[1:3])
        if self._interpolation is Inter.NEAREST:
            return batch[:, _nearest(source_size[0], size[0])][:, :, _nearest(source_size[1], size[1])]
        planes = batch.transpose(0, 3, 1, 2)
        resized = np.empty((*planes.shape[:2], *size), _resized_dtype(batch))
        resizing = _Bilinear(batch.shape[3], source_size, size)
        for image, target in zip(planes, resized, strict=True):  # one at a time, which fits the processor's cache
            resizing.resize(image, target)
        return resized.transpose(0, 2, 3, 1)  # planes in memory, which HWC2CHW then need not copy

    def _target_size(self, source_size: tuple[int, ...]) -> tuple[int, int]:
        if len(self._size) == 2:
            return self._size[0], self._size[1]
        height, width = (max(1, int(edge * self._size[0] / min(source_size))) for edge in source_size)
        return height, width


class CenterCrop(Transform):
    """Cut a window of `size`, (height, width) or one integer for a square, out of the middle; the dtype stays.

    Raises:
        UsageError: a size below 1, or (when applied) a window larger than the image.
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        sizes = parse_counts("CenterCrop: size", size, lengths=(1, 2), minimum=1)
        self._height, self._width = sizes[0], sizes[-1]

    def apply_batch(self, batch: np.ndarray) -> np.ndarray:
        _check_images("CenterCrop", batch)
        top, left = (batch.shape[1] - self._height) // 2, (batch.shape[2] - self._width) // 2
        if top < 0 or left < 0:
            raise UsageError(
                f"CenterCrop: a window of {(self._height, self._width)} does not fit an image of {batch.shape[1:3]}; "
                "use a smaller size, or Resize before"
            )
        return batch[:, top : top + self._height, left : left + self._width]


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
        num_samples, height, width, channels = batch.shape
        padded_size = height + self._top + self._bottom, width + self._left + self._right
        num_tops = padded_size[0] - self._height + 1
        num_lefts = padded_size[1] - self._width + 1
        if num_tops < 1 or num_lefts < 1:
            raise UsageError(
                f"RandomCrop: a window of {(self._height, self._width)} does not fit the padded image of "
                f"{padded_size}; use a smaller size or more padding"
            )
        padded = np.zeros((num_samples, *padded_size, channels), batch.dtype)
        padded[:, self._top : self._top + height, self._left : self._left + width] = batch
        cropped = np.empty((num_samples, self._height, self._width, channels), batch.dtype)
        tops, lefts = draws.integers(0, num_tops).tolist(), draws.integers(1, num_lefts).tolist()
        for image, target, top, left in zip(padded, cropped, tops, lefts, strict=True):
            target[:] = image[top : top + self._height, left : left + self._width]
        return cropped


class RandomResizedCrop(RandomTransform):
    """Cut a window of random area and shape at a random place, and resize it to `size` as Resize does.

    The window has `scale` (smallest, largest) of the image's area and `ratio` (smallest, largest) of width to height;
    where `max_attempts` draws give none that fits, the largest one in the middle with a ratio in range. As of
    Szegedy et al. 2015, and torchvision.

    Raises:
        UsageError: a size below 1, or a range that is empty or not positive.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Inter = Inter.LINEAR,
        max_attempts: int = 10,
    ) -> None:
        sizes = parse_counts("RandomResizedCrop: size", size, lengths=(1, 2), minimum=1)
        self._size = sizes[0], sizes[-1]
        for name, limits in (("scale", scale), ("ratio", ratio)):
            if len(limits) != 2 or not 0 < limits[0] <= limits[1]:
                raise UsageError(f"RandomResizedCrop: {name}={limits!r}; give the smallest and the largest, above 0")
        self._scale, self._ratio = tuple(scale), tuple(ratio)
        self._resize = Resize(self._size, interpolation)
        self._max_attempts = parse_count("RandomResizedCrop: max_attempts", max_attempts, minimum=1)

    def apply_random_batch(self, batch: np.ndarray, draws: SampleDraws) -> np.ndarray:
        _check_images("RandomResizedCrop", batch)
        cropped = np.empty((len(batch), *self._size, batch.shape[3]), _resized_dtype(batch))
        for number, (top, left, height, width) in enumerate(self._windows(batch.shape[1], batch.shape[2], draws)):
            window = batch[number : number + 1, top : top + height, left : left + width]
            cropped[number] = self._resize.apply_batch(window)[0]
        return cropped

    def _windows(self, height: int, width: int, draws: SampleDraws) -> np.ndarray:
        """Return (B, 4) int64: top, left, height, width."""
        low, high = np.log(self._ratio)
        whole = width / height
        ratio = min(max(whole, self._ratio[0]), self._ratio[1])
        widest, highest = (round(height * ratio), height) if ratio < whole else (width, round(width / ratio))
        windows = np.tile([(height - highest) // 2, (width - widest) // 2, highest, widest], (len(draws), 1))
        is_open = np.ones(len(draws), bool)
        for stream in range(0, 4 * self._max_attempts, 4):
            area = height * width * (self._scale[0] + draws.uniform(stream) * (self._scale[1] - self._scale[0]))
            ratios = np.exp(low + draws.uniform(stream + 1) * (high - low))
            heights, widths = np.rint(np.sqrt(area / ratios)), np.rint(np.sqrt(area * ratios))
            fits = is_open & (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
            tops = draws.uniform(stream + 2) * (height - heights + 1)
            lefts = draws.uniform(stream + 3) * (width - widths + 1)
            windows[fits] = np.stack([tops, lefts, heights, widths], axis=1)[fits]
            is_open &= ~fits
        return windows


class RandomHorizontalFlip(RandomTransform):
    """Mirror left and right with probability `prob`.

    Raises:
        UsageError: `prob` is not in 0..1.
    """

    _axis = 2

    def __init__(self, prob: float = 0.5) -> None:
        if not 0 <= prob <= 1:
            raise UsageError(f"{type(self).__name__}: prob={prob!r}; it must be in 0..1")
        self._prob = prob

    def apply_random_batch(self, batch: np.ndarray, draws: SampleDraws) -> np.ndarray:
        _check_images(type(self).__name__, batch)
        is_flipped = draws.uniform(0) < self._prob
        flipped = batch.copy()
        flipped[is_flipped] = np.flip(batch[is_flipped], self._axis)
        return flipped


class RandomVerticalFlip(RandomHorizontalFlip):
    """Mirror top and bottom with probability `prob`.

    Raises:
        UsageError: `prob` is not in 0..1.
    """

    _axis = 1


class _Bilinear:
    """Resizes images of (C, H, W) from one size to another."""

    def __init__(self, channels: int, source_size: tuple[int, ...], size: tuple[int, int]) -> None:
        self._columns = _Neighbours(source_size[1], (channels, source_size[0], size[1]), axis=2)
        self._rows = _Neighbours(source_size[0], (channels, *size), axis=1)

    def resize(self, image: np.ndarray, target: np.ndarray) -> None:
        """Write an image into `target`, rounded if that holds integers."""
        values = self._rows.mix(self._columns.mix(image.astype(np.float32)))
        if np.issubdtype(target.dtype, np.integer):
            np.rint(values, out=values)
        np.copyto(target, values, casting="unsafe")


class _Neighbours:
    """How an axis of `source_size` values of (C, H, W) is resized to what it is in `shape`.

    Each value is a mean of two neighbours weighted by their distances, in float32 and in this order, as in torch's
    interpolate.
    """

    def __init__(self, source_size: int, shape: tuple[int, int, int], axis: int) -> None:
        size = shape[axis]
        ratio = np.float32(source_size) / np.float32(size)
        places = np.maximum(ratio * np.arange(0.5, size, dtype=np.float32) - np.float32(0.5), np.float32(0))
        self._axis = axis
        self._first = np.minimum(places.astype(np.int64), source_size - 1)
        self._second = np.minimum(self._first + 1, source_size - 1)
        share = np.minimum(places - self._first.astype(np.float32), np.float32(1))
        share = share[:, None] if axis == 1 else share
        self._shares = [np.array(np.broadcast_to(part, shape[1:])) for part in (np.float32(1) - share, share)]
        self._mixed, self._other = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def mix(self, image: np.ndarray) -> np.ndarray:
        """Return an image of float32 resized; the next call overwrites it."""
        np.take(image, self._first, self._axis, out=self._mixed, mode="clip")  # "raise" would buffer
        np.take(image, self._second, self._axis, out=self._other, mode="clip")
        self._mixed *= self._shares[0]
        self._other *= self._shares[1]
        self._mixed += self._other
        return self._mixed


def _nearest(source_size: int, size: int) -> np.ndarray:
    """Return for each pixel of an axis the one it is taken from, as torch's interpolate and OpenCV choose it."""
    return np.arange(size) * source_size // size


def _resized_dtype(batch: np.ndarray) -> np.dtype:
    return batch.dtype if np.issubdtype(batch.dtype, np.integer) else np.dtype(np.float32)


def _check_images(name: str, batch: np.ndarray) -> None:
    if batch.ndim != 4:
        raise UsageError(f"{name}: needs images with 3 axes (height, width, channel), got shape {batch.shape[1:]}")
