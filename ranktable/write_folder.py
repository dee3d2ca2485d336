"""Writes a folder with all of its files or not at all: half of the parts of a table are another table."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ranktable.errors import WriteError
from ranktable.write import DEFAULT_MODE, sync_folder

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
