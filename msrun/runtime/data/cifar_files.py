"""The files of CIFAR-10 and CIFAR-100, as they are published: the binary and the Python version, plain or gzipped.

Binary: a row of records, each the labels of one byte (CIFAR-100: coarse, then fine) and 1024 red, 1024 green and 1024
blue values of a 32x32 image, row by row. Python: a pickled dictionary with the same images as an array `data` of
(n, 3072) uint8 and lists of labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msrun.errors import DataError
from msrun.runtime.data.cifar_pickle import load_batch
from msrun.runtime.data.stored_file import find_file, map_content

IMAGE_BYTES = 3 * 32 * 32
_LIMIT_BYTES = 1 << 30
"""Several times the largest published file."""


@dataclass(frozen=True)
class CifarVersion:
    """One form in which a data set is published."""

    folder: str
    files: Mapping[str, tuple[str, ...]]
    """"train" or "test" -> its files."""
    is_binary: bool


@dataclass(frozen=True)
class CifarFormat:
    """What the files of a data set hold. Labels are in the order of the bytes of a record."""

    versions: tuple[CifarVersion, ...]
    label_names: tuple[str, ...]
    keys: tuple[str, ...]
    """The labels' names in the Python version."""
    num_classes: tuple[int, ...]

    @property
    def record_bytes(self) -> int:
        return len(self.keys) + IMAGE_BYTES


@dataclass(frozen=True)
class CifarPart:
    """The samples of one file."""

    pixels: np.ndarray
    """(n, 3072) uint8: red, green, blue."""
    labels: tuple[np.ndarray, ...]
    """Each (n,)."""


CIFAR10 = CifarFormat(
    (
        CifarVersion(
            "cifar-10-batches-bin",
            {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
            is_binary=True,
        ),
        CifarVersion(
            "cifar-10-batches-py",
            {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
            is_binary=False,
        ),
    ),
    ("label",),
    ("labels",),
    (10,),
)
CIFAR100 = CifarFormat(
    (
        CifarVersion("cifar-100-binary", {"train": ("train.bin",), "test": ("test.bin",)}, is_binary=True),
        CifarVersion("cifar-100-python", {"train": ("train",), "test": ("test",)}, is_binary=False),
    ),
    ("coarse_label", "fine_label"),
    ("coarse_labels", "fine_labels"),
    (20, 100),
)


def read_cifar(folder: Path, form: CifarFormat, parts: Sequence[str]) -> list[CifarPart]:
    """Return the samples of `parts` ("train", "test"), one entry a file, in the files' order.

    The files lie in `folder` or in the folder that the archive makes there; where both versions are, the binary one
    is read, which is mapped, not loaded.

    Raises:
        DataError: a file is missing or damaged; with the byte where it is.
    """
    version, paths = _find(folder, form, parts)
    read = _read_binary if version.is_binary else _read_pickle
    return [read(path, form) for path in paths]


def find_parts(folder: Path, form: CifarFormat) -> list[str]:
    """Return the parts of which all files are there, in the order of their names."""
    for version, place in _places(folder, form):
        parts = sorted(version.files, key=version.files.__getitem__)
        if found := [part for part in parts if all(find_file(place, name) for name in version.files[part])]:
            return found
    return []


def _find(folder: Path, form: CifarFormat, parts: Sequence[str]) -> tuple[CifarVersion, list[Path]]:
    fewest_missing: list[str] = []
    for version, place in _places(folder, form):
        names = [name for part in parts for name in version.files[part]]
        paths = [find_file(place, name) for name in names]
        found = [path for path in paths if path is not None]
        if len(found) == len(names):
            return version, found
        missing = [name for name, path in zip(names, paths, strict=True) if path is None]
        if not fewest_missing or (found and len(missing) < len(fewest_missing)):
            fewest_missing = missing
    folders = " and ".join(repr(version.folder) for version in form.versions)
    raise DataError(
        f"{folder}: missing {', '.join(fewest_missing)}, also with .gz, here and in {folders}; put the files there"
    )


def _places(folder: Path, form: CifarFormat) -> Iterator[tuple[CifarVersion, Path]]:
    for version in form.versions:
        yield version, folder
        yield version, folder / version.folder


def _read_binary(path: Path, form: CifarFormat) -> CifarPart:
    size = form.record_bytes
    flat = map_content(path, _LIMIT_BYTES)
    num_records, rest = divmod(len(flat), size)
    if rest or not num_records:
        raise DataError(
            f"{path}: {len(flat)} bytes, but the file must be one or more records of {size} bytes; record "
            f"{num_records} at byte {num_records * size} is cut short: it is damaged or not the binary version, "
            "fetch it again"
        )
    records = flat.reshape(num_records, size)
    num_labels = len(form.keys)
    labels = tuple(records[:, i] for i in range(num_labels))
    for i, (column, num_classes) in enumerate(zip(labels, form.num_classes, strict=True)):
        wrong = np.flatnonzero(column >= num_classes)
        if len(wrong):
            raise DataError(
                f"{path}: {form.label_names[i]} {column[wrong[0]]} at byte {wrong[0] * size + i} (record {wrong[0]}); "
                f"it must be in 0..{num_classes - 1}: the file is damaged or another one, fetch it again"
            )
    return CifarPart(records[:, num_labels:], labels)


def _read_pickle(path: Path, form: CifarFormat) -> CifarPart:
    batch = load_batch(path, map_content(path, _LIMIT_BYTES).tobytes())
    pixels = batch.get("data")
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != IMAGE_BYTES or not len(pixels):
        raise DataError(f"{path}: holds no images (n, {IMAGE_BYTES}) under 'data'; it is another file under this name")
    labels = []
    for name, key, num_classes in zip(form.label_names, form.keys, form.num_classes, strict=True):
        values: Any = batch.get(key)
        if not isinstance(values, list) or len(values) != len(pixels):
            raise DataError(
                f"{path}: no list of {len(pixels)} labels under {key!r}; it is another file under this name"
            )
        for number, value in enumerate(values):
            if type(value) is not int or not 0 <= value < num_classes:
                raise DataError(
                    f"{path}: {name} {value!r} of image {number}; it must be in 0..{num_classes - 1}: the file is "
                    "damaged, fetch it again"
                )
        labels.append(np.array(values, np.int64))
    return CifarPart(pixels, tuple(labels))
