"""Reads files and standard input; the only place of the package that opens files to read.

A named pipe that nobody writes to is refused instead of waited for without end.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
from dataclasses import replace
from pathlib import Path

from ranktable.errors import ReadError
from ranktable.reading.document import Document, parse_document

MAX_BYTES = 64 * 1024 * 1024
"""Largest file that is read. HCCL itself stops at 40 MiB."""

STDIN_NAME = "<stdin>"
_MAX_NAME = 255


def read_document(path: str | os.PathLike[str]) -> Document:
    """Return the JSON object of the file at `path`, not yet taken for a table; raises ReadError, JsonTextError."""
    name, data = read_source(path)
    is_link = name != STDIN_NAME and Path(name).is_symlink() and Path(name).is_file()
    return replace(parse_document(data, name), is_link=is_link)


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


WAIT_FOR_WRITER_S = 10
"""How long a named pipe without a writer is waited for."""


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
