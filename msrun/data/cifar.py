"""CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator, Sequence
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
    """Return the dictionary that a pickle holds, with text as keys and arrays of uint8 as numpy arrays."""
    try:
        found = load_inert(
            content,
            lambda module, name: (module.replace("numpy._core", "numpy.core"), name) in _NAMES,
            encoding="bytes",
        )
        if not isinstance(found, dict):
            raise pickle.UnpicklingError(f"it holds {type(found).__name__}, not a dictionary")
        return {_text(key): _value(value) for key, value in found.items()}
    except (pickle.UnpicklingError, ValueError, TypeError) as error:
        raise DataError(
            f"{path}: cannot be read as a batch of the Python version: {error}; fetch it again from where it is "
            "published"
        ) from error


def _is_known(module: str, name: str) -> bool:
    return (module.replace("numpy._core", "numpy.core"), name) in _NAMES


def _value(value: Any) -> Any:
    """Return a value, where it is the record of an array of uint8 as numpy's."""
    if not isinstance(value, Named):
        return value
    if value.name == "_reconstruct" and isinstance(value.state, tuple):
        _, shape, dtype, is_fortran, raw = value.state
    elif value.name == "_frombuffer":
        raw, dtype, shape, order = value.args
        is_fortran = _text(order) == "F"
    else:
        return _bytes(value)
    raw = _bytes(raw)
    if not (isinstance(dtype, Named) and dtype.name == "dtype" and _text(*dtype.args[:1]) in ("u1", "|u1", "uint8")):
        raise pickle.UnpicklingError("it holds an array that is not of uint8")
    if not isinstance(raw, bytes | bytearray | memoryview) or not all(type(edge) is int for edge in shape):
        raise pickle.UnpicklingError("it holds an array without plain bytes")
    if not all(0 <= edge <= len(raw) for edge in shape) or math.prod(shape) != len(raw):
        raise pickle.UnpicklingError(f"it holds an array of shape {shape} with {len(raw)} bytes")
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if is_fortran else "C")


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
class CifarFormat:
    """What the files of a data set hold. Labels are in the order of the bytes of a record."""

    folders: tuple[str, str]
    """That the archives of the binary and the Python version make."""
    files: dict[str, tuple[str, ...]]
    """"train" or "test" -> its files; those of the binary version have .bin behind their names."""
    label_names: tuple[str, ...]
    num_classes: tuple[int, ...]

    def places(self, folder: Path) -> Iterator[tuple[str, Path]]:
        """Yield what is behind the names of files, and where they may be."""
        for suffix, own in zip((".bin", ""), self.folders, strict=True):
            yield suffix, folder
            yield suffix, folder / own


CifarPart = tuple[np.ndarray, tuple[np.ndarray, ...]]
"""The samples of one file: pixels (n, 3072) uint8, red, green, blue, and labels, each (n,)."""

CIFAR10 = CifarFormat(
    ("cifar-10-batches-bin", "cifar-10-batches-py"),
    {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    ("label",),
    (10,),
)
CIFAR100 = CifarFormat(
    ("cifar-100-binary", "cifar-100-python"),
    {"train": ("train",), "test": ("test",)},
    ("coarse_label", "fine_label"),
    (20, 100),
)


def read_cifar(folder: Path, form: CifarFormat, parts: Sequence[str]) -> list[CifarPart]:
    """Return the samples of `parts` ("train", "test"), one entry a file, in the files' order.

    The files lie in `folder` or in the folder that the archive makes there; where both versions are, the binary one
    is read, which is mapped, not loaded.
    """
    fewest_missing: list[str] = []
    for suffix, place in form.places(folder):
        names = [f"{name}{suffix}" for part in parts for name in form.files[part]]
        found = {name: path for name in names if (path := find_file(place, name))}
        if len(found) == len(names):
            return [(_read_binary if suffix else _read_pickle)(found[name], form) for name in names]
        missing = [name for name in names if name not in found]
        if not fewest_missing or (found and len(missing) < len(fewest_missing)):
            fewest_missing = missing
    raise DataError(
        f"{folder}: missing {', '.join(fewest_missing)}, also with .gz, here and in "
        f"{' and '.join(map(repr, form.folders))}; put the files there"
    )


def find_parts(folder: Path, form: CifarFormat) -> list[str]:
    """Return the parts of which all files are there, in the order of their names."""
    for suffix, place in form.places(folder):
        parts = sorted(form.files, key=form.files.__getitem__)
        if found := [part for part in parts if all(find_file(place, f"{name}{suffix}") for name in form.files[part])]:
            return found
    return []


def _read_binary(path: Path, form: CifarFormat) -> CifarPart:
    num_labels = len(form.label_names)
    size = num_labels + IMAGE_BYTES
    flat = map_content(path, _LIMIT_BYTES)
    num_records, rest = divmod(len(flat), size)
    if rest or not num_records:
        raise DataError(
            f"{path}: {len(flat)} bytes, but the file must be one or more records of {size} bytes; record "
            f"{num_records} at byte {num_records * size} is cut short: it is damaged or not the binary version, "
            "fetch it again"
        )
    records = flat.reshape(num_records, size)
    labels = tuple(records[:, i] for i in range(num_labels))
    for i, (column, num_classes) in enumerate(zip(labels, form.num_classes, strict=True)):
        wrong = np.flatnonzero(column >= num_classes)
        if len(wrong):
            raise DataError(
                f"{path}: {form.label_names[i]} {column[wrong[0]]} at byte {wrong[0] * size + i} (record {wrong[0]}); "
                f"it must be in 0..{num_classes - 1}: the file is damaged or another one, fetch it again"
            )
    return records[:, num_labels:], labels


def _read_pickle(path: Path, form: CifarFormat) -> CifarPart:
    batch = load_batch(path, map_content(path, _LIMIT_BYTES).tobytes())
    pixels = batch.get("data")
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != IMAGE_BYTES or not len(pixels):
        raise DataError(f"{path}: holds no images (n, {IMAGE_BYTES}) under 'data'; it is another file under this name")
    labels = []
    for name, num_classes in zip(form.label_names, form.num_classes, strict=True):
        values: Any = batch.get(f"{name}s")
        if not isinstance(values, list) or len(values) != len(pixels):
            raise DataError(
                f"{path}: no list of {len(pixels)} labels under '{name}s'; it is another file under this name"
            )
        for number, value in enumerate(values):
            if type(value) is not int or not 0 <= value < num_classes:
                raise DataError(
                    f"{path}: {name} {value!r} of image {number}; it must be in 0..{num_classes - 1}: the file is "
                    "damaged, fetch it again"
                )
        labels.append(np.array(values, np.int64))
    return pixels, tuple(labels)


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
        columns = {"image": ColumnParts([pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for pixels, _ in parts])}
        for i, name in enumerate(self._form.label_names):
            columns[name] = ColumnParts([labels[i] for _, labels in parts], np.int64)
        super().__init__(
            ArraySource(columns),
            num_samples,
            num_parallel_workers,
            shuffle,
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
