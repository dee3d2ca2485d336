"""Reads and writes files and reads standard input: the only place of the package that opens any.

A named pipe that nobody writes to is refused instead of waited for without end. What is written is the old file or the
whole new one to a reader, never a part; a folder is written with all of its files or not at all, because half of the
parts of a table are another table.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from ranktable.errors import ReadError, WriteError

MAX_BYTES = 64 * 1024 * 1024
"""Largest file that is read. HCCL itself stops at 40 MiB."""

STDIN_NAME = "<stdin>"
_MAX_NAME = 255
WAIT_FOR_WRITER_S = 10
"""How long a named pipe without a writer is waited for."""
DEFAULT_MODE = 0o644
_FOLDER_MODE = 0o755
_NUM_WRITERS = 16
"""Waiting for the disk is most of the work; file systems make several files durable at once."""


def read_source(path: str | os.PathLike[str]) -> tuple[str, bytes]:
    """Return the name for messages and the bytes of the file at `path`; `-` is standard input. Raises ReadError."""
    name = os.fspath(path)
    return (STDIN_NAME, _read_stdin()) if name == "-" else (name, read_bytes(name))


def read_bytes(name: str) -> bytes:
    """Return the content of a file of at most 64 MiB; raises ReadError."""
    if not name:
        raise ReadError("''", "the name is empty", "name a file, or - for standard input")
    try:
        if Path(name).is_dir():
            raise ReadError(name, "it is a directory", "name the file in it")
        return _limit(read_at_most(name, MAX_BYTES + 1), name)
    except OSError as error:
        raise ReadError(_shorten(name), (error.strerror or str(error)).lower(), _suggest_path(name, error)) from error
    except ValueError as error:
        raise ReadError(repr(_shorten(name)), str(error), "write a plain path") from error


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise ReadError(STDIN_NAME, "standard input is closed", "pipe a table into it")
    try:
        return _limit(sys.stdin.buffer.read(MAX_BYTES + 1), STDIN_NAME)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "standard input is closed"
        raise ReadError(STDIN_NAME, reason.lower(), "pipe a table into it") from error


def _limit(data: bytes, source: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise ReadError(source, f"it is larger than {MAX_BYTES // 1024**2} MiB", "rank tables are smaller than that")
    return data


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..."


def _suggest_path(name: str, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "its symbolic links lead in a circle; name the file itself"
    if isinstance(error, FileNotFoundError) and Path(name).is_symlink():
        return f"it is a symbolic link to {Path(name).readlink()}, which is not there"
    if isinstance(error, FileNotFoundError):
        if Path(name).is_absolute():
            return "check the path"
        try:
            return f"check the path; the current directory is {Path.cwd()}"
        except FileNotFoundError:
            return "the current directory has been removed; change to one that exists"
    return "make it readable for this user" if isinstance(error, PermissionError) else "check the path"


def read_at_most(name: str, num_bytes: int) -> bytes:
    """Return the first `num_bytes` of a file or pipe. Raises OSError, also for a pipe that stays without a writer."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        start = _await_writer(descriptor) if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else b""
        os.set_blocking(descriptor, True)
        return start + stream.read(num_bytes - len(start))


def _await_writer(descriptor: int) -> bytes:
    """Return when there is something to read, or its end, or somebody who will write; with what was read meanwhile."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if poller.poll(WAIT_FOR_WRITER_S * 1000):
        return b""
    try:
        start = os.read(descriptor, 1)
    except BlockingIOError:
        return b""  # it has a writer, which has not written yet
    if not start:
        raise OSError(0, f"it is a pipe that nothing has written to for {WAIT_FOR_WRITER_S} s")
    return start


def write_bytes(path: str | os.PathLike[str], data: bytes, *, mode: int = DEFAULT_MODE) -> None:
    """Write `data` to `path` as `write_table` does; raises WriteError."""
    target = Path(path)
    try:
        _replace(target, data, mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WriteError(str(target), reason.lower(), _suggest(target, error)) from error


def _replace(target: Path, data: bytes, mode: int) -> None:
    import tempfile  # not needed by those who only read tables

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


def write_folder(folder: str | os.PathLike[str], files: Iterable[tuple[str, bytes]]) -> None:
    """Write `files` (names with contents) into `folder`, which must be new or empty.

    The files are made durable in a folder beside it, which then takes its name. Raises WriteError; there is nothing new
    then.
    """
    import shutil
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

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
