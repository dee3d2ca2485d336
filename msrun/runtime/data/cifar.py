"""CIFAR-10, read from its original binary files.

A file is a row of records of 3073 bytes: the label, then 1024 red, 1024 green and 1024 blue values of a 32x32 image,
row by row.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from msrun.errors import DataError
from msrun.runtime.data.dataset import Dataset
from msrun.runtime.data.mnist import check_folder, parts_of_usage
from msrun.runtime.data.source import ArraySource, ColumnParts

RECORD_BYTES = 1 + 3 * 32 * 32
FILES_OF_USAGE = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}


class Cifar10Dataset(Dataset):
    """Columns `image` (32, 32, 3) uint8, red first, and `label` () int64 of CIFAR-10.

    `data_batch_1.bin` .. `data_batch_5.bin` (train) and `test_batch.bin` (test) lie in `dataset_dir` or in its
    `cifar-10-batches-bin`; they are mapped, not loaded. `usage` is "train", "test" or "all" (both, train first).
    The other parameters are those of `Dataset`.

    Raises:
        DataError: a file is missing, empty or no whole number of records.
        UsageError: a parameter is out of range.
    """

    def __init__(
        self,
        dataset_dir: str | os.PathLike[str],
        usage: str = "train",
        num_samples: int | None = None,
        shuffle: bool | None = None,
        num_shards: int | None = None,
        shard_id: int | None = None,
        seed: int = 0,
    ) -> None:
        folder = check_folder(dataset_dir)
        names = [name for part in parts_of_usage(usage) for name in FILES_OF_USAGE[part]]
        records = [read_records(path) for path in _get_files(folder, names)]
        columns = {
            "image": ColumnParts([part[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for part in records]),
            "label": ColumnParts([part[:, 0] for part in records], np.int64),
        }
        super().__init__(
            ArraySource(columns),
            num_samples=num_samples,
            shuffle=shuffle,
            num_shards=num_shards,
            shard_id=shard_id,
            seed=seed,
        )


def read_records(path: Path) -> np.ndarray:
    """Return a CIFAR-10 file as (n, 3073) uint8, mapped read-only.

    Raises:
        DataError: the file is unreadable, empty or no whole number of records.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes == 0 or size_bytes % RECORD_BYTES:
            raise DataError(
                f"{path}: {size_bytes} bytes, but the file must be one or more records of {RECORD_BYTES} bytes; "
                "it is damaged or not the binary version, fetch it again"
            )
        return np.memmap(path, np.uint8, mode="r").reshape(-1, RECORD_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the path and its rights") from error


def _get_files(folder: Path, names: list[str]) -> list[Path]:
    places = [folder, folder / "cifar-10-batches-bin"]
    place = next((place for place in places if (place / names[0]).is_file()), places[0])
    missing = [name for name in names if not (place / name).is_file()]
    if missing:
        has_pickles = any(
            (place / sub / names[0].removesuffix(".bin")).is_file()
            for place in places
            for sub in ("", "cifar-10-batches-py")
        )
        remedy = (
            "this is the Python version of the data, fetch the binary one" if has_pickles else "put the files there"
        )
        raise DataError(f"{folder}: missing {', '.join(missing)}, here and in 'cifar-10-batches-bin'; {remedy}")
    return [place / name for name in names]
