"""MNIST, read from its original idx files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from msrun.errors import DataError, UsageError, near_miss
from msrun.runtime.data.dataset import Dataset
from msrun.runtime.data.idx import read_idx
from msrun.runtime.data.sharding import find_compat
from msrun.runtime.data.source import ArraySource, ColumnParts

PREFIX_OF_USAGE = {"train": "train", "test": "t10k"}
"""Which files hold which part."""

_SUB_FOLDERS = ("", "MNIST/raw", "raw", "{usage}")


class MnistDataset(Dataset):
    """Columns `image` (H, W, 1) uint8 and `label` () int64 of MNIST, or of any data in its four files.

    The files `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    `t10k-labels-idx1-ubyte` may end in `.gz`, may have a dot before `idx`, and may lie in `dataset_dir`, in its
    `MNIST/raw` or `raw`, or in its `train` and `test`. Uncompressed files are mapped, not loaded.
    `usage` is "train", "test" or "all" (both, train first). None is "train", in MindSpore's meaning all files that
    `dataset_dir` itself has, in the order of their names. The other parameters are those of `Dataset`.

    Raises:
        DataError: a file is missing or damaged, or images and labels do not fit together.
        UsageError: a parameter is out of range.
    """

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
        there = [part for part, prefix in PREFIX_OF_USAGE.items() if any(folder.glob(f"{prefix}-images*"))]
        parts = [read_mnist(folder, part) for part in parts_of_usage(usage, sorted(there))]
        if len({images.shape[1:] for images, _ in parts}) > 1:
            shapes = " and ".join(str(images.shape[1:]) for images, _ in parts)
            raise DataError(f"{folder}: train and test images differ in shape, {shapes}; read them one at a time")
        columns = {
            "image": ColumnParts([images[..., None] for images, _ in parts]),
            "label": ColumnParts([labels for _, labels in parts], np.int64),
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


def read_mnist(folder: Path, usage: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (n, H, W) uint8 and labels (n,) of any integer type of "train" or "test".

    Raises:
        DataError: a file is missing or damaged, or images and labels do not fit together.
    """
    image_path = _get_file(folder, usage, "images", 3)
    label_path = _get_file(folder, usage, "labels", 1)
    images = _read_bytes(image_path, num_dims=3)
    labels = _read_bytes(label_path, num_dims=1)
    if len(images) != len(labels):
        raise DataError(
            f"{image_path}: {len(images)} images, but {label_path.name} has {len(labels)} labels; "
            "take both files from the same source"
        )
    return images, labels


def find_mnist_file(folder: Path, usage: str, kind: str, num_dims: int) -> Path | None:
    """Return the file of `kind` ("images" or "labels") if it is in one of the known places."""
    return next((path for path in _candidates(folder, usage, kind, num_dims) if path.is_file()), None)


def parts_of_usage(usage: str | None, there: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the parts that "train", "test" or "all" means; raises UsageError for anything else.

    Args:
        there: parts whose files are there, in the order of their names: what None means to MindSpore.
    """
    if usage is None:
        return tuple(there) if there and find_compat() == "mindspore" else ("train",)
    if usage == "all":
        return ("train", "test")
    if usage not in PREFIX_OF_USAGE:
        hint = near_miss(str(usage), (*PREFIX_OF_USAGE, "all"))
        raise UsageError(f"usage={usage!r}{hint}; it must be 'train', 'test' or 'all'")
    return (usage,)


def check_folder(dataset_dir: str | os.PathLike[str] | None) -> Path:
    """Return `dataset_dir` as a path; raises DataError when it is None or not a folder."""
    if dataset_dir is None:
        raise DataError("dataset_dir is None; set the environment variable that the script takes the data folder from")
    folder = Path(dataset_dir)
    if not folder.is_dir():
        raise DataError(f"dataset_dir {str(folder)!r} is not a folder; pass the folder that holds the data files")
    return folder


def _candidates(folder: Path, usage: str, kind: str, num_dims: int) -> Iterator[Path]:
    stem = f"{PREFIX_OF_USAGE[usage]}-{kind}"
    for sub_folder in _SUB_FOLDERS:
        for joint in ("-", "."):
            for suffix in ("", ".gz"):
                yield folder / sub_folder.format(usage=usage) / f"{stem}{joint}idx{num_dims}-ubyte{suffix}"


def _get_file(folder: Path, usage: str, kind: str, num_dims: int) -> Path:
    path = find_mnist_file(folder, usage, kind, num_dims)
    if path is None:
        stem = f"{PREFIX_OF_USAGE[usage]}-{kind}"
        places = ", ".join(repr(sub_folder.format(usage=usage)) for sub_folder in _SUB_FOLDERS[1:])
        raise DataError(
            f"{folder}: the {usage} {kind} are missing; looked for {stem}-idx{num_dims}-ubyte and "
            f"{stem}.idx{num_dims}-ubyte, each also with .gz, here and in {places}; put the file there, or make "
            "digits with: python -m msrun.runtime.data.digits DIR"
        )
    return path


def _read_bytes(path: Path, *, num_dims: int) -> np.ndarray:
    array = read_idx(path, should_map=True)
    is_right_type = array.dtype == np.uint8 if num_dims == 3 else array.dtype.kind in "ui"
    if array.ndim != num_dims or not is_right_type or 0 in array.shape:
        raise DataError(
            f"{path}: holds {array.dtype} of shape {array.shape}, but needs {'uint8' if num_dims == 3 else 'integers'} "
            f"with {num_dims} dimension{'s' if num_dims > 1 else ''} and at least one sample; it is another file under "
            "this name"
        )
    return array
