"""Files that an index names, which another may have written: only those of its own folder are opened. No torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 32
"""Of a file that is read whole; the values of tensors are not."""


def is_contained(name: Any) -> bool:
    """Return whether a name is a path that stays below the folder it is seen from."""
    return isinstance(name, str) and bool(name) and not name.startswith("/") and not {"..", ""} & {*name.split("/")}


def find_contained(folder: Path, name: Any, *homes: Path) -> Path:
    """Return the path of a plain file in a folder.

    Args:
        homes: other folders that links in it may lead into.

    Raises:
        ValueError: the name, or the link that it is, leads out of the folder.
        OSError: there is no such file, or it is no plain one.
    """
    if not is_contained(name) or "\0" in name:
        raise ValueError(f"it names {str(name)[:200]!r}, which is no file of its folder")
    path = folder / name
    real = path.resolve(strict=True)
    if not any(real.is_relative_to(home.resolve()) for home in (folder, *homes)):
        raise ValueError(f"{name} is a link that leads out of its folder; copy the file there")
    if not real.is_file():
        raise OSError(errno.EINVAL, f"{name} is no plain file")
    return path


def read_contained(folder: Path, name: str) -> bytes:
    """Return the content of a plain file in a folder.

    Raises:
        ValueError, OSError: as `find_contained` does; or it is too large.
    """
    with find_contained(folder, name).open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MOST_BYTES:
            raise ValueError(f"{name} has {size} bytes, at most {MOST_BYTES} are read")
        return stream.read(size)
