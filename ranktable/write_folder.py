"""Writes a folder of text files so that it is there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ranktable.errors import WriteError
from ranktable.write import DEFAULT_MODE

_FOLDER_MODE = 0o755


def write_folder(path: str | os.PathLike[str], files: Mapping[str, str]) -> None:
    """Write every text of `files` under its name into the new folder `path`, which may be there when it is empty.

    The folder is filled under a temporary name beside it, and then takes its place. Raises WriteError; nothing is
    left then.
    """
    target = Path(path)
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", suffix=".tmp", dir=target.parent))
    except (OSError, ValueError) as error:
        raise _refusal(target, error) from error
    try:
        for name, text in files.items():
            _write(temporary / name, text)
        temporary.chmod(_FOLDER_MODE)
        temporary.replace(target)
    except (OSError, ValueError) as error:
        raise _refusal(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(DEFAULT_MODE)


def _refusal(target: Path, error: OSError | ValueError) -> WriteError:
    if target.exists():
        return WriteError(str(target), "it is there already and is no empty folder", "name a folder that is not there")
    reason = getattr(error, "strerror", None) or str(error)
    remedy = f"create the folder {target.parent} first" if isinstance(error, FileNotFoundError) else ""
    return WriteError(str(target), reason.lower(), remedy)
