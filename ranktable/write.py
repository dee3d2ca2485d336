"""Writes rank tables so that a reader sees the old file or the whole new one, never a part.

A folder is written with all of its files or not at all: half of the parts of a table are another table.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ranktable.codec import encode_table
from ranktable.errors import WriteError
from ranktable.model import RankTable

DEFAULT_MODE = 0o644


def write_table(path: str | os.PathLike[str], table: RankTable, *, mode: int = DEFAULT_MODE) -> None:
    """Write `table` to `path` with exactly the permissions `mode`, whatever the umask.

    The text goes to a temporary name in the same folder, is made durable, then takes the place of `path`; a symbolic
    link there is replaced, not followed. Raises WriteError; the file that was there before is then untouched.
    """
    write_bytes(path, encode_table(table).encode("ascii"), mode=mode)


def write_bytes(path: str | os.PathLike[str], data: bytes, *, mode: int = DEFAULT_MODE) -> None:
    """Write `data` to `path` as `write_table` does; raises WriteError."""
    target = Path(path)
    try:
        _replace(target, data, mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WriteError(str(target), reason.lower(), _suggest(target, error)) from error


def _replace(target: Path, data: bytes, mode: int) -> None:
    if target.is_dir():
        raise IsADirectoryError(0, "it is a directory")
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make the new name durable too. Some network file systems refuse to sync folders; the data is safe by then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        return
    finally:
        os.close(descriptor)


def _suggest(target: Path, error: OSError | ValueError) -> str:
    if isinstance(error, IsADirectoryError):
        return "name a file in it"
    if isinstance(error, FileNotFoundError):
        return f"create the folder {target.parent} first"
    return (
        f"choose a folder that this user can write to, not {target.parent}"
        if isinstance(error, PermissionError)
        else ""
    )


_FOLDER_MODE = 0o755
_NUM_WRITERS = 16
"""Waiting for the disk is most of the work; file systems make several files durable at once."""


def write_folder(folder: str | os.PathLike[str], files: Iterable[tuple[str, bytes]]) -> None:
    """Write `files` (names with contents) into `folder`, which must be new or empty.

    The files are made durable in a folder beside it, which then takes its name. Raises WriteError; there is nothing new
    then.
    """
    target = Path(folder)
    try:
        _refuse_full(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", suffix=".tmp", dir=target.parent))
        try:
            with ThreadPoolExecutor(_NUM_WRITERS) as writers:
                list(writers.map(lambda file: _write(temporary / file[0], file[1]), files))
            temporary.chmod(_FOLDER_MODE)
            sync_folder(temporary)
            temporary.replace(target)
            sync_folder(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WriteError(str(target), reason.lower(), "name a folder that can be made here") from error


def _refuse_full(target: Path) -> None:
    if target.is_dir() and next(target.iterdir(), None) is not None:
        remedy = "name a new one, so that no part of another is taken for one of these"
        raise WriteError(str(target), "the folder is not empty", remedy)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as stream:
        os.fchmod(stream.fileno(), DEFAULT_MODE)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
