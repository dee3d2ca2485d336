"""CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import os

import numpy as np

from msrun.runtime.data.cifar_files import CIFAR10, CIFAR100, CifarFormat, find_parts, read_cifar
from msrun.runtime.data.dataset import Dataset
from msrun.runtime.data.mnist import check_folder, parts_of_usage
from msrun.runtime.data.source import ArraySource, ColumnParts


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
