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
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from msrun.errors import DataError

DTYPE_OF_CODE: dict[int, np.dtype] = {
    0x08: np.dtype("uint8"),
    0x09: np.dtype("int8"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
"""Element type byte -> dtype as stored."""

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_DIM = 2**32 - 1
_CHUNK_BYTES = 1 << 20


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
    with _data_errors(path), path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        if is_gzip:
            with gzip.GzipFile(fileobj=file) as stream:
                header = _read_header(cast(BinaryIO, stream), path)
                flat = np.frombuffer(_read_payload(cast(BinaryIO, stream), header, path), header.dtype)
        else:
            header = _read_header(file, path)
            _check_size(path, header, os.fstat(file.fileno()).st_size - header.header_bytes)
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


def _read_header(stream: BinaryIO, path: Path) -> IdxHeader:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in DTYPE_OF_CODE:
        raise DataError(
            f"{path}: starts with bytes {magic.hex(' ') or '(none)'}, but an idx file starts with 00 00, a type byte "
            f"({', '.join(f'{code:02x}' for code in DTYPE_OF_CODE)}) and a number of dimensions; "
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


def _read_payload(stream: BinaryIO, header: IdxHeader, path: Path) -> bytearray:
    """Read to the end in pieces, so that a wrong header cannot ask for more memory than the file has data."""
    payload = bytearray()
    while len(payload) <= header.data_bytes:
        chunk = stream.read(min(_CHUNK_BYTES, header.data_bytes + 1 - len(payload)))
        if not chunk:
            break
        payload += chunk
    _check_size(path, header, len(payload), is_lower_bound=len(payload) > header.data_bytes)
    return payload


def _check_size(path: Path, header: IdxHeader, actual_bytes: int, *, is_lower_bound: bool = False) -> None:
    if actual_bytes != header.data_bytes:
        raise DataError(
            f"{path}: dimensions {header.shape} of {header.dtype.name} need {header.data_bytes} bytes of data, "
            f"found {actual_bytes}{' or more' if is_lower_bound else ''}; the file is damaged, fetch it again"
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


@contextmanager
def _data_errors(path: Path) -> Iterator[None]:
    """Turn what reading can raise into a DataError that names the file and the remedy."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or truncated gzip file ({error}); fetch it again") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the path and its rights") from error
