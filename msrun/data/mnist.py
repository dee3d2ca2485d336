"""MNIST, read from its original idx files."""

from __future__ import annotations

import gzip
import math
import os
import struct
from collections.abc import Sequence
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from msrun.data.config import find_compat
from msrun.data.dataset import Dataset
from msrun.data.source import ArraySource, ColumnParts
from msrun.data.stored_file import open_data, read_at_most
from msrun.errors import DataError, UsageError, near_miss
from ranktable.files import write_whole

DTYPE_OF_CODE: dict[int, np.dtype] = {
    0x08: np.dtype("uint8"),
    0x09: np.dtype("int8"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
"""Element type byte -> dtype as stored."""

_MAX_DIM = 2**32 - 1


def read_idx(path: str | os.PathLike[str], *, should_map: bool = False) -> np.ndarray:
    """Return the array stored in an idx file; gzip is recognised by content, whatever the name.

    The dtype is uint8, int8, int16, int32, float32 or float64 in native byte order; the shape is the file's.
    With `should_map`, an uncompressed file of one-byte elements is mapped read-only instead of loaded.

    Raises:
        DataError: the file is missing or unreadable, has a wrong magic number, fewer or more bytes than its
            dimensions say, or is a damaged gzip file.
    """
    path = Path(path)
    with open_data(path) as stream:
        dtype, shape = _read_header(stream, path)
        begin, size = 4 + 4 * len(shape), math.prod(shape) * dtype.itemsize
        payload = read_at_most(stream, size) if isinstance(stream, gzip.GzipFile) else None
        found = os.fstat(stream.fileno()).st_size - begin if payload is None else len(payload)
        if found != size:
            more = " or more" if payload is not None and found > size else ""
            raise DataError(
                f"{path}: dimensions {shape} of {dtype.name} need {size} bytes of data from byte {begin} on, found "
                f"{found}{more}; the file is damaged, fetch it again"
            )
        if payload is not None:
            flat = np.frombuffer(payload, dtype)
        elif should_map and dtype.itemsize == 1 and size:
            flat = np.memmap(path, dtype, mode="r", offset=begin, shape=(size,))
        else:
            flat = np.fromfile(path, dtype, offset=begin)
    try:
        return flat.reshape(shape).astype(dtype.newbyteorder("="), copy=False)
    except ValueError as error:
        raise DataError(f"{path}: numpy cannot hold dimensions {shape} ({error}); the header is wrong") from error


def _read_header(stream: BufferedIOBase, path: Path) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the type of the elements, as stored, and the shape."""
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in DTYPE_OF_CODE:
        raise DataError(
            f"{path}: starts at byte 0 with {magic.hex(' ') or '(none)'}, but an idx file starts with 00 00, a type "
            f"byte ({', '.join(f'{code:02x}' for code in DTYPE_OF_CODE)}) and a number of dimensions; "
            "fetch the original file again"
        )
    num_dims = magic[3]
    dims = stream.read(4 * num_dims)
    if len(dims) < 4 * num_dims:
        raise DataError(
            f"{path}: the header of {num_dims} dimensions needs {4 + 4 * num_dims} bytes, found {4 + len(dims)}; "
            "the file is cut short, fetch it again"
        )
    return DTYPE_OF_CODE[magic[2]], struct.unpack(f">{num_dims}I", dims)


def write_idx(path: str | os.PathLike[str], array: np.ndarray) -> None:
    """Write `array` as an idx file, gzipped if the name ends in `.gz`; the file appears whole or not at all.

    Raises:
        DataError: the dtype is none of the six that the format has, or a dimension does not fit 32 bits.
    """
    path, array = Path(path), np.asarray(array)
    if any(dim > _MAX_DIM for dim in array.shape):
        raise DataError(f"{path}: an idx file cannot hold shape {array.shape}; every dimension is at most {_MAX_DIM}")
    code = next((code for code, dtype in DTYPE_OF_CODE.items() if dtype == array.dtype.newbyteorder(">")), None)
    if code is None:
        names = ", ".join(dtype.name for dtype in DTYPE_OF_CODE.values())
        raise DataError(f"{path}: an idx file cannot hold {array.dtype}; cast the array to one of {names}")
    header = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    content = header + array.astype(DTYPE_OF_CODE[code], order="C").tobytes()
    write_whole(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content, may_wait=False)


PREFIX_OF_USAGE = {"train": "train", "test": "t10k"}
"""Which files hold which part."""

KINDS = (("images", 3), ("labels", 1))
"""What the files hold, and how many dimensions it has."""
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
            num_samples,
            num_parallel_workers,
            shuffle,
            num_shards=num_shards,
            shard_id=shard_id,
            seed=seed,
        )


def read_mnist(folder: Path, usage: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (n, H, W) uint8 and labels (n,) of any integer type of "train" or "test"."""
    (image_path, images), (label_path, labels) = (_read_part(folder, usage, *kind) for kind in KINDS)
    if len(images) != len(labels):
        raise DataError(
            f"{image_path}: {len(images)} images, but {label_path.name} has {len(labels)} labels; "
            "take both files from the same source"
        )
    return images, labels


def find_mnist_file(folder: Path, usage: str, kind: str, num_dims: int) -> Path | None:
    """Return the file of `kind` ("images" or "labels") if it is in one of the known places."""
    stem = f"{PREFIX_OF_USAGE[usage]}-{kind}"
    names = [f"{stem}{joint}idx{num_dims}-ubyte{suffix}" for joint in ("-", ".") for suffix in ("", ".gz")]
    places = (folder / place.format(usage=usage) / name for place in _SUB_FOLDERS for name in names)
    return next((path for path in places if path.is_file()), None)


def _read_part(folder: Path, usage: str, kind: str, num_dims: int) -> tuple[Path, np.ndarray]:
    path = find_mnist_file(folder, usage, kind, num_dims)
    if path is None:
        stem = f"{PREFIX_OF_USAGE[usage]}-{kind}"
        places = ", ".join(repr(sub_folder.format(usage=usage)) for sub_folder in _SUB_FOLDERS[1:])
        raise DataError(
            f"{folder}: the {usage} {kind} are missing; looked for {stem}-idx{num_dims}-ubyte and "
            f"{stem}.idx{num_dims}-ubyte, each also with .gz, here and in {places}; put the file there, or make "
            "digits with: python -m msrun.data.digits DIR"
        )
    array = read_idx(path, should_map=True)
    is_right_type = array.dtype == np.uint8 if num_dims == 3 else array.dtype.kind in "ui"
    if array.ndim != num_dims or not is_right_type or 0 in array.shape:
        raise DataError(
            f"{path}: holds {array.dtype} of shape {array.shape}, but needs {'uint8' if num_dims == 3 else 'integers'} "
            f"with {num_dims} dimension{'s' if num_dims > 1 else ''} and at least one sample; it is another file under "
            "this name"
        )
    return path, array


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
