"""CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msrun.data.dataset import Dataset
from msrun.data.mnist import check_folder, parts_of_usage
from msrun.data.source import ArraySource, ColumnParts
from msrun.data.stored_file import find_file, map_content
from msrun.errors import DataError
from msrun.runtime.inert_pickle import Named, load_inert

_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),  # since protocol 5
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # bytes, as Python 3 writes them for protocols before 3
}


def load_batch(path: Path, content: bytes) -> dict[str, Any]:
    """Return the dictionary that a pickle holds, with text as keys and arrays of uint8 as numpy arrays.

    Raises:
        DataError: the pickle is damaged, names something to run, or holds something else; with its offset.
    """
    try:
        found = load_inert(content, lambda module, name: (_plain(module), name) in _NAMES, encoding="bytes")
        if not isinstance(found, dict):
            raise pickle.UnpicklingError(f"it holds {type(found).__name__}, not a dictionary")
        return {_text(key): _value(value) for key, value in found.items()}
    except (pickle.UnpicklingError, ValueError, TypeError) as error:
        raise DataError(
            f"{path}: cannot be read as a batch of the Python version: {error}; fetch it again from where it is "
            "published"
        ) from error


def _plain(module: str) -> str:
    return module.replace("numpy._core", "numpy.core")


def _value(value: Any) -> Any:
    if not isinstance(value, Named):
        return value
    if value.name == "_reconstruct" and isinstance(value.state, tuple):
        _, shape, dtype, is_fortran, raw = value.state
    elif value.name == "_frombuffer":
        raw, dtype, shape, order = value.args
        is_fortran = _text(order) == "F"
    else:
        return _bytes(value)
    return _array(_bytes(raw), dtype, shape, "F" if is_fortran else "C")


def _array(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    is_uint8 = isinstance(dtype, Named) and dtype.name == "dtype" and _text(*dtype.args[:1]) in ("u1", "|u1", "uint8")
    if not is_uint8:
        raise pickle.UnpicklingError("it holds an array that is not of uint8")
    if not isinstance(raw, bytes | bytearray | memoryview) or not all(type(edge) is int for edge in shape):
        raise pickle.UnpicklingError("it holds an array without plain bytes")
    if not all(0 <= edge <= len(raw) for edge in shape) or math.prod(shape) != len(raw):
        raise pickle.UnpicklingError(f"it holds an array of shape {shape} with {len(raw)} bytes")
    return np.frombuffer(raw, np.uint8).reshape(shape, order=order)


def _bytes(value: Any) -> Any:
    if isinstance(value, Named) and value.name == "encode":
        text, encoding = (*value.args, "latin1")[:2]
        if _text(encoding) not in ("latin1", "latin-1") or not isinstance(text, str):
            raise pickle.UnpicklingError(f"it holds bytes in the encoding {_text(encoding)!r}")
        return text.encode("latin1")
    return value


def _text(value: Any) -> str:
    value = _bytes(value)
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


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


class _CifarDataset(Dataset):
    """What both have in common."""

    _form: CifarFormat

    def __init__(
        self,
        dataset_dir: str | os.PathLike[str],
        usage: str | None = None,
        num_samples: int | None = None,
        num_parallel_workers: int | None = None,
        shuffle: bool | None = None,
        *,
        num_shards: int | None = None,
        shard_id: int | None = None,
        seed: int | None = None,
    ) -> None:
        folder = check_folder(dataset_dir)
        parts = read_cifar(folder, self._form, parts_of_usage(usage, find_parts(folder, self._form)))
        columns = {
            "image": ColumnParts([part.pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for part in parts]),
            **{
                name: ColumnParts([part.labels[i] for part in parts], np.int64)
                for i, name in enumerate(self._form.label_names)
            },
        }
        super().__init__(
            ArraySource(columns),
            num_samples=num_samples,
            num_parallel_workers=num_parallel_workers,
            shuffle=shuffle,
            num_shards=num_shards,
            shard_id=shard_id,
            seed=seed,
        )


class Cifar10Dataset(_CifarDataset):
    """Columns `image` (32, 32, 3) uint8, red first, and `label` () int64 of CIFAR-10.

    Reads the binary version (`data_batch_1.bin` .. `data_batch_5.bin`, `test_batch.bin`, mapped) and the Python version
    (`data_batch_1`, ..., loaded; nothing that the pickles name is run). The files may end in `.gz` and lie in
    `dataset_dir`, or in its `cifar-10-batches-bin` or `cifar-10-batches-py`.
    `usage` is "train", "test" or "all" (both, train first). None is "train", in MindSpore's meaning all that is there,
    in the order of the files' names. The other parameters are those of `Dataset`.

    Raises:
        DataError: a file is missing or damaged; the message names the byte.
        UsageError: a parameter is out of range.
    """

    _form = CIFAR10


class Cifar100Dataset(_CifarDataset):
    """Columns `image` (32, 32, 3) uint8, red first, `coarse_label` () and `fine_label` () int64 of CIFAR-100.

    Reads `train.bin` and `test.bin` of the binary version, or `train` and `test` of the Python version, from
    `dataset_dir` or its `cifar-100-binary` or `cifar-100-python`; all else is as of `Cifar10Dataset`.
    """

    _form = CIFAR100
