"""Click logs in Criteo's format, read line by line from where they lie.

A line has 40 columns with tabs between them: the label, 13 integers and 26 categories of 8 hexadecimal digits; columns
may be empty (Criteo's Display Advertising Challenge and 1TB Click Logs, 2013-2014). The file is mapped, and only the
place of every 32nd line is kept, so that a file of any size takes little memory and every rank reads its own lines.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np

from msrun.data.config import parse_count
from msrun.data.dataset import Dataset
from msrun.data.mnist import parts_of_usage
from msrun.data.stored_file import open_data, write_files
from msrun.errors import DataError, UsageError

NUM_INTEGERS, NUM_CATEGORIES = 13, 26
_COLUMNS = 1 + NUM_INTEGERS + NUM_CATEGORIES
_STRIDE = 32
"""Lines from one noted place to the next."""
_CHUNK_BYTES = 1 << 24
_NEWLINE = 10
DEFAULT_HASH_SIZE = 100_000


class CriteoDataset(Dataset):
    """Columns `dense` (13,) float32, `ids` (26,) int64 and `label` () float32 of click logs in Criteo's format.

    `dense` is log(1 + max(value, 0)) of the integers, 0 where there is none. `ids` are rows of one table of
    26 * `hash_size` rows, the categories' tables one after the other: category c with value v has row
    c * hash_size + 1 + v mod (hash_size - 1), and row c * hash_size where it is empty.

    `dataset_path` is a file, or a folder with `train.txt` and `test.txt`, of which `usage` is "train", "test" or "all".
    The other parameters are those of `Dataset`.

    Raises:
        DataError: a file is missing, empty or compressed; when read: a line is damaged, with its number and column.
        UsageError: a parameter is out of range.
    """

    def __init__(
        self,
        dataset_path: str | os.PathLike[str],
        usage: str = "train",
        num_samples: int | None = None,
        num_parallel_workers: int | None = None,
        shuffle: bool | None = None,
        *,
        hash_size: int = DEFAULT_HASH_SIZE,
        num_shards: int | None = None,
        shard_id: int | None = None,
        seed: int | None = None,
    ) -> None:
        hash_size = parse_count("hash_size", hash_size, minimum=2)
        files = [LineFile(path) for path in _find_files(Path(dataset_path), usage)]
        super().__init__(
            ClickLog(files, hash_size),
            num_samples,
            num_parallel_workers,
            shuffle,
            num_shards=num_shards,
            shard_id=shard_id,
            seed=seed,
        )


def _find_files(path: Path, usage: str) -> list[Path]:
    names = [f"{part}.txt" for part in parts_of_usage(usage)]
    if not path.is_dir():
        return [path]
    for name in names:
        if not (path / name).is_file():
            raise DataError(
                f"{path}: {name} is missing; give a folder with train.txt and test.txt, or the path of a file"
            )
    return [path / name for name in names]


class LineFile:
    """A text file whose lines are read by their number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_data(path) as stream:
            if isinstance(stream, gzip.GzipFile):
                raise DataError(f"{path}: is compressed; its lines are read by their number: unpack it (gunzip -k)")
            if os.fstat(stream.fileno()).st_size == 0:
                raise DataError(f"{path}: is empty; it must have at least one line")
        self._content = np.memmap(path, np.uint8, mode="r")
        self.num_lines, self._places = self._index()

    def __getstate__(self) -> dict[str, Any]:
        """Send a worker process where the file is, not what is in it."""
        return {**self.__dict__, "_content": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._content = np.memmap(self.path, np.uint8, mode="r")

    def _index(self) -> tuple[int, np.ndarray]:
        """Return the number of lines, and where every `_STRIDE`-th begins."""
        places, count = [np.zeros(1, np.int64)], 0
        for begin in range(0, len(self._content), _CHUNK_BYTES):
            ends = np.flatnonzero(self._content[begin : begin + _CHUNK_BYTES] == _NEWLINE) + begin + 1
            first = (-count - 1) % _STRIDE
            places.append(ends[first::_STRIDE])
            count += len(ends)
        has_last = self._content[-1] != _NEWLINE
        return count + bool(has_last), np.concatenate(places)

    def read_line(self, number: int) -> bytes:
        """Return line `number` (from 0) without its end."""
        block, rest = divmod(number, _STRIDE)
        end = self._places[block + 1] if block + 1 < len(self._places) else len(self._content)
        return bytes(self._content[self._places[block] : end]).split(b"\n", rest + 1)[rest].rstrip(b"\r")


class ClickLog:
    """Columns of click logs in several files, one after the other."""

    column_names: tuple[str, ...] = ("dense", "ids", "label")

    def __init__(self, files: list[LineFile], hash_size: int) -> None:
        self._files = files
        self._ends = np.cumsum([file.num_lines for file in files])
        self.num_samples = int(self._ends[-1])
        self._hash_size = hash_size

    def read(self, sample_keys: np.ndarray) -> list[np.ndarray]:
        """Read the lines and return (k, 13) float32, (k, 26) int64 and (k,) float32."""
        rows = [self._row(int(index)) for index in sample_keys[:, 1]]
        integers = np.array([row[1] for row in rows], np.float32).reshape(-1, NUM_INTEGERS)
        values = np.array([row[2] for row in rows], np.int64).reshape(-1, NUM_CATEGORIES)
        hashed = np.where(values < 0, 0, 1 + values % (self._hash_size - 1))
        ids = hashed + np.arange(NUM_CATEGORIES) * self._hash_size
        return [np.log1p(np.maximum(integers, 0)), ids, np.array([row[0] for row in rows], np.float32)]

    def _row(self, index: int) -> tuple[int, list[int], list[int]]:
        """Return label, integers (0 where empty) and categories (-1 where empty) of one line."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        file = self._files[number]
        line = index - int(self._ends[number]) + file.num_lines
        columns = file.read_line(line).split(b"\t")
        if len(columns) != _COLUMNS:
            raise DataError(
                f"{file.path}: line {line + 1} has {len(columns)} columns; it must have {_COLUMNS}: the label, "
                f"{NUM_INTEGERS} integers, {NUM_CATEGORIES} categories"
            )
        try:
            label = int(columns[0])
            integers = [int(column) if column else 0 for column in columns[1 : 1 + NUM_INTEGERS]]
            categories = [int(column, 16) if column else -1 for column in columns[1 + NUM_INTEGERS :]]
        except ValueError:
            raise _damage(file, line, columns) from None
        if label not in (0, 1):
            raise _damage(file, line, columns)
        return label, integers, categories


def _damage(file: LineFile, line: int, columns: list[bytes]) -> DataError:
    """Return the error that names the first damaged column."""
    for place, column in enumerate(columns):
        what = "0 or 1" if place == 0 else "a whole number" if place <= NUM_INTEGERS else "hexadecimal digits"
        try:
            value = int(column, 16 if place > NUM_INTEGERS else 10) if column or not place else 0
            is_right = value in (0, 1) or place > 0
        except ValueError:
            is_right = False
        if not is_right:
            return DataError(f"{file.path}: line {line + 1}, column {place + 1} holds {column!r}; it must be {what}")
    raise UsageError("no column is damaged")


NUM_TRAIN, NUM_TEST = 16384, 4096
_SEED = 1314
_EMPTY = 0.05
"""Share of columns without a value."""
_RATE = -2.2
"""Score of an average sample: about a quarter of them are clicks."""


def write_clicks(directory: str | os.PathLike[str], num_train: int = NUM_TRAIN, num_test: int = NUM_TEST) -> Path:
    """Write `train.txt` and `test.txt` to `directory` unless they are there, and return it, for `CriteoDataset`.

    Any number of processes may call this at once: files appear whole.

    Raises:
        DataError: the folder cannot be written to.
    """
    folder = Path(directory)
    parts = {"train.txt": (0, num_train), "test.txt": (1, num_test)}
    missing = {name: part for name, part in parts.items() if not (folder / name).is_file()}
    write_files(folder, "click logs", {name: b"\n".join(_lines(*part)) + b"\n" for name, part in missing.items()})
    return folder


def _lines(part: int, count: int) -> list[bytes]:
    world = np.random.RandomState(_SEED)  # the same in both parts: only its samples differ
    sizes = np.geomspace(4, 3000, NUM_CATEGORIES).astype(int)
    weights = [world.normal(0, 0.5, size) for size in sizes]
    hashes = [world.randint(0, 2**32, size, dtype=np.uint64) for size in sizes]
    of_integers = world.normal(0, 0.35, NUM_INTEGERS)
    draw = np.random.RandomState(_SEED + 1 + part)
    scores = np.full(count, _RATE)
    columns = []
    for weight in of_integers:
        values = np.floor(draw.lognormal(1.0, 1.2, count)).astype(int) - 1
        is_empty = draw.rand(count) < _EMPTY
        scores += np.where(is_empty, 0, weight * np.log1p(np.maximum(values, 0)))
        columns.append([b"" if empty else b"%d" % value for value, empty in zip(values, is_empty, strict=True)])
    for weight, names in zip(weights, hashes, strict=True):
        values = np.minimum((len(names) ** draw.rand(count)).astype(int) - 1, len(names) - 1)  # the first ones most
        is_empty = draw.rand(count) < _EMPTY
        scores += np.where(is_empty, 0, weight[values])
        texts = [b"%08x" % int(name) for name in names]
        columns.append([b"" if empty else texts[value] for value, empty in zip(values, is_empty, strict=True)])
    clicks = draw.rand(count) < 1 / (1 + np.exp(-scores))
    columns.insert(0, [b"1" if click else b"0" for click in clicks])
    return [b"\t".join(row) for row in zip(*columns, strict=True)]
