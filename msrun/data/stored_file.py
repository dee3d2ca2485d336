"""A data file on disk, plain or gzipped: opening it, and what can be wrong with it."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from msrun.errors import DataError
from ranktable.files import write_whole

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20


@contextmanager
def open_data(path: Path) -> Iterator[BufferedIOBase]:
    """Open a file to read its content; gzip is recognised by its first bytes, whatever the name."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if not is_gzip:
                yield file
                return
            with gzip.GzipFile(fileobj=file) as unpacked:
                try:
                    yield unpacked
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    raise DataError(
                        f"{path}: damaged or truncated gzip file, behind byte {unpacked.tell()} of its content "
                        f"({error}); fetch it again"
                    ) from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the path and its rights") from error


def map_content(path: Path, limit_bytes: int) -> np.ndarray:
    """Return the content of a file as (n,) uint8: mapped read-only, or loaded if it is gzipped, up to a limit and one.

    Raises:
        DataError: as of `open_data`.
    """
    with open_data(path) as stream:
        if isinstance(stream, gzip.GzipFile):
            return np.frombuffer(read_at_most(stream, limit_bytes), np.uint8)
        if os.fstat(stream.fileno()).st_size == 0:
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, mode="r")


def read_at_most(stream: BufferedIOBase, limit_bytes: int) -> bytearray:
    """Read up to `limit_bytes` and one more, in pieces: a small gzip file may claim to be of any size."""
    content = bytearray()
    while len(content) <= limit_bytes:
        chunk = stream.read(min(_CHUNK_BYTES, limit_bytes + 1 - len(content)))
        if not chunk:
            break
        content += chunk
    return content


def find_file(folder: Path, name: str) -> Path | None:
    """Return `folder/name` or `folder/name.gz`, whichever is there."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def write_files(folder: Path, what: str, contents: Mapping[str, bytes]) -> None:
    """Write files, each of which appears whole; `what` names them in the error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_whole(folder / name, content, may_wait=False)
    except OSError as error:
        raise DataError(f"{folder}: cannot write {what} ({error.strerror or error}); use another folder") from error
