"""The idx file format, in which MNIST is published: one array of any number of dimensions, plain or gzipped.

Layout, all integers big-endian: two zero bytes, one byte for the element type, one byte for the number of
dimensions, one unsigned 32-bit integer per dimension, then the elements in C order.
"""

from __future__ import annotations

import gzip
import math
import os
import secrets
import struct
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from msrun.errors import DataError
from msrun.runtime.data.stored_file import open_data, read_at_most

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


@dataclass(frozen=True)
class IdxHeader:
    """What the first bytes of an idx file say about the rest."""

    dtype: np.dtype
    """Element type as stored, big-endian."""
    shape: tuple[int, ...]

    @property
    def header_bytes(self) -> int:
        return 4 + 4 * len(self.shape)

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
        header = _read_header(stream, path)
        if isinstance(stream, gzip.GzipFile):
            flat = np.frombuffer(_read_payload(stream, header, path), header.dtype)
        else:
            _check_size(path, header, os.fstat(stream.fileno()).st_size - header.header_bytes)
            flat = _load_plain(path, header, should_map=should_map)
    return _shaped(flat, header, path)


def write_idx(path: str | os.PathLike[str], array: np.ndarray) -> None:
    """Write `array` as an idx file, gzipped if the name ends in `.gz`; the file appears whole or not at all.

    Raises:
        DataError: the dtype is none of the six that the format has, or a dimension does not fit 32 bits.
    """
    path, array = Path(path), np.asarray(array)
    content = _render_header(path, array) + array.astype(_stored_dtype(path, array), order="C").tobytes()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_header(stream: BufferedIOBase, path: Path) -> IdxHeader:
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
    return IdxHeader(DTYPE_OF_CODE[magic[2]], struct.unpack(f">{num_dims}I", dims))


def _read_payload(stream: BufferedIOBase, header: IdxHeader, path: Path) -> bytearray:
    payload = read_at_most(stream, header.data_bytes)
    _check_size(path, header, len(payload), is_lower_bound=len(payload) > header.data_bytes)
    return payload


def _check_size(path: Path, header: IdxHeader, actual_bytes: int, *, is_lower_bound: bool = False) -> None:
    if actual_bytes != header.data_bytes:
        raise DataError(
            f"{path}: dimensions {header.shape} of {header.dtype.name} need {header.data_bytes} bytes of data from "
            f"byte {header.header_bytes} on, found {actual_bytes}{' or more' if is_lower_bound else ''}; the file is "
            "damaged, fetch it again"
        )


def _load_plain(path: Path, header: IdxHeader, *, should_map: bool) -> np.ndarray:
    if should_map and header.dtype.itemsize == 1 and header.data_bytes:
        return np.memmap(path, header.dtype, mode="r", offset=header.header_bytes, shape=(header.data_bytes,))
    return np.fromfile(path, header.dtype, offset=header.header_bytes)


def _shaped(flat: np.ndarray, header: IdxHeader, path: Path) -> np.ndarray:
    try:
        shaped = flat.reshape(header.shape)
    except ValueError as error:
        raise DataError(
            f"{path}: numpy cannot hold dimensions {header.shape} ({error}); the header is wrong"
        ) from error
    return shaped.astype(header.dtype.newbyteorder("="), copy=False)


def _stored_dtype(path: Path, array: np.ndarray) -> np.dtype:
    return DTYPE_OF_CODE[_type_code(path, array)]


def _type_code(path: Path, array: np.ndarray) -> int:
    for code, dtype in DTYPE_OF_CODE.items():
        if dtype == array.dtype.newbyteorder(">"):
            return code
    names = ", ".join(dtype.name for dtype in DTYPE_OF_CODE.values())
    raise DataError(f"{path}: an idx file cannot hold {array.dtype}; cast the array to one of {names}")


def _render_header(path: Path, array: np.ndarray) -> bytes:
    if any(dim > _MAX_DIM for dim in array.shape):
        raise DataError(f"{path}: an idx file cannot hold shape {array.shape}; every dimension is at most {_MAX_DIM}")
    return struct.pack(f">HBB{array.ndim}I", 0, _type_code(path, array), array.ndim, *array.shape)
