"""Reads and writes files that users name, and reads standard input: the one door of all commands.

What is read has a limit of size, and a named pipe that nobody writes to is refused instead of waited for without end.
What is written is the old file or the whole new one to a reader, never a part.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ranktable.errors import ReadError, WriteError

MAX_BYTES = 64 * 1024 * 1024
"""Largest file that is read. HCCL itself stops at 40 MiB."""

STDIN_NAME = "<stdin>"
_MAX_NAME = 255
WAIT_FOR_WRITER_S = 10
"""How long a named pipe without a writer is waited for."""
WAIT_FOR_READER_S = 10
"""How long a named pipe is waited for that nobody reads, or that is full."""
MAX_TEXT_BYTES = 1_000_000
"""Largest file of settings."""
_RETRY_S = 0.02
_MAX_LINKS = 40
_UNREAD = "it is a pipe that nobody reads"
DEFAULT_MODE = 0o644


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
    try:
        return _limit(sys.stdin.buffer.read(MAX_BYTES + 1), STDIN_NAME)
    except (AttributeError, OSError, ValueError) as error:  # there is none, or it is a folder, or it is closed
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
    return "make it readable for this user" if isinstance(error, PermissionError) else "check the path"


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a small UTF-8 file or pipe; a byte order mark is left out.

    Raises OSError: it cannot be read, is larger, is not UTF-8, or a pipe stays without a writer; `strerror` says what.
    """
    return decode_text(read_at_most(path, max_bytes + 1), max_bytes)


def decode_text(data: bytes, max_bytes: int) -> str:
    """Return bytes of which at most one more than `max_bytes` were read as `read_text` does; raises OSError."""
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "not UTF-8 text") from None


def read_at_most(
    path: str | os.PathLike[str], num_bytes: int, check: Callable[[os.stat_result], None] | None = None
) -> bytes:
    """Return the first `num_bytes` of a file or pipe; `check` is given what was opened, and may raise.

    Raises OSError: it cannot be read, or a pipe stays without a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if check is not None:
            check(found)
        start = _await_writer(descriptor) if stat.S_ISFIFO(found.st_mode) else b""
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return start + stream.read(num_bytes - len(start))
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(descriptor)


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
    """Write `data` to `path` as `write_whole` does; raises WriteError."""
    target = Path(path)
    try:
        write_whole(target, data, mode=mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WriteError(str(target), reason.lower(), _suggest(target, error)) from error


def write_whole(path: str | os.PathLike[str], data: bytes, *, mode: int | None = None, may_wait: bool = True) -> None:
    """Write an output file that a user has named, as `open_whole` does; raises OSError."""
    with open_whole(path, mode=mode, may_wait=may_wait) as stream:
        stream.write(data)


@contextlib.contextmanager
def open_whole(path: str | os.PathLike[str], *, mode: int | None = None, may_wait: bool = True) -> Iterator[BinaryIO]:
    """Give a stream for the content of a file that a user has named; raises OSError.

    A plain file, or none: the content goes to a temporary name beside it, is made durable, and takes its place when the
    context ends without an exception. A device, a named pipe or a descriptor (/dev/stdout) is written into. Of a
    symbolic link the target is written; the link stays. `mode` has exact permissions; None is for those of the file
    that is there, else for what the umask leaves of 0666. With `may_wait` the disk is waited for, and
    `WAIT_FOR_READER_S` the reader of a pipe.
    """
    target = _follow_links(Path(path))
    try:
        found = target.stat()
    except FileNotFoundError:
        found = None
    is_plain = found is None or stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    is_special = target.is_symlink() or not is_plain
    with _into(target, may_wait) if is_special else _replacing(target, found, mode, may_wait) as stream:
        yield stream


def replace_file(path: Path, data: bytes, *, mode: int) -> None:
    """Put a file into a folder of ours: a link, pipe or device that somebody has put there is replaced, not followed.

    It is whole to a reader, but may not have reached the disk. Raises OSError: it cannot be written.
    """
    with _replacing(path, None, mode, may_wait=False) as stream:
        stream.write(data)


def _follow_links(path: Path) -> Path:
    """Return where a chain of links ends; a link in /proc stands for an open file, and is where it ends."""
    for _ in range(_MAX_LINKS):
        if not path.is_symlink() or path.parent.resolve().is_relative_to("/proc"):
            return path
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


@contextlib.contextmanager
def _replacing(target: Path, found: os.stat_result | None, mode: int | None, may_wait: bool) -> Iterator[BinaryIO]:
    if target.is_dir() and not target.is_symlink():
        raise IsADirectoryError(errno.EISDIR, "it is a directory", str(target))
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666 if mode is None else mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            if mode is None and found is not None:
                with contextlib.suppress(OSError):
                    os.fchown(descriptor, found.st_uid, found.st_gid)
                mode = stat.S_IMODE(found.st_mode)
            if mode is not None:
                os.fchmod(descriptor, mode)
            yield stream
            stream.flush()
            if may_wait:
                os.fsync(descriptor)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if may_wait:
        # The new name is made durable too. Some network file systems refuse that; the data is safe by then.
        descriptor = os.open(target.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
        os.close(descriptor)


@contextlib.contextmanager
def _into(target: Path, may_wait: bool) -> Iterator[BinaryIO]:
    deadline = time.monotonic() + (WAIT_FOR_READER_S if may_wait else 0)
    while True:
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            break
        except OSError as error:
            if error.errno != errno.ENXIO or not stat.S_ISFIFO(target.stat().st_mode):
                raise
            if time.monotonic() >= deadline:
                raise OSError(errno.ENXIO, _UNREAD) from None
        time.sleep(_RETRY_S)
    with io.BufferedWriter(_PatientWriter(descriptor, WAIT_FOR_READER_S if may_wait else 0)) as stream:
        yield stream


class _PatientWriter(io.RawIOBase):
    """Writes to what may be full, and waits for room, but not without end."""

    def __init__(self, descriptor: int, limit_s: float) -> None:
        self._descriptor = descriptor
        self._limit_s = limit_s

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        while poller.poll(self._limit_s * 1000):
            with contextlib.suppress(BlockingIOError):  # another writer was faster
                return os.write(self._descriptor, data)
        raise OSError(errno.EAGAIN, _UNREAD)

    def close(self) -> None:
        if not self.closed:
            try:
                super().close()
            finally:
                os.close(self._descriptor)


def _suggest(target: Path, error: OSError | ValueError) -> str:
    if isinstance(error, IsADirectoryError):
        return "name a file in it"
    if isinstance(error, FileNotFoundError):
        return f"create the folder {target.parent} first"
    is_refused = isinstance(error, PermissionError)
    return f"choose a folder that this user can write to, not {target.parent}" if is_refused else ""
