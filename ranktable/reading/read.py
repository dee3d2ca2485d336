"""Reads rank tables from files and from standard input; the only place of the package that opens files to read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ranktable.codec import decode_table
from ranktable.errors import NotReadyError, ReadError
from ranktable.model import INITIALIZING, RankTable
from ranktable.reading.document import Document, parse_document

MAX_BYTES = 64 * 1024 * 1024
"""Largest file that is read. HCCL itself stops at 40 MiB."""

STDIN_NAME = "<stdin>"


def read_table(path: str | os.PathLike[str]) -> RankTable:
    """Return the table of the file at `path`; `-` is standard input.

    Its structure is right, its values may break rules: pass it to `validate_table`.
    Raises ReadError, JsonTextError, UnsupportedDialectError, UnknownDialectError, InvalidTableError, NotReadyError.
    """
    document = read_document(path)
    table = decode_table(document)
    if table.status == INITIALIZING:
        raise NotReadyError(document.source)
    return table


def parse_table(data: bytes | str, source: str = "<text>") -> RankTable:
    """Return the table in `data`, whatever its status. Raises what `read_table` does, ReadError apart."""
    encoded = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return decode_table(parse_document(encoded, source))


def read_document(path: str | os.PathLike[str]) -> Document:
    """Return the JSON object of the file at `path`, not yet taken for a table; raises ReadError, JsonTextError."""
    name, data = read_source(path)
    return parse_document(data, name)


def read_source(path: str | os.PathLike[str]) -> tuple[str, bytes]:
    """Return the name for messages and the bytes of the file at `path`; `-` is standard input. Raises ReadError."""
    name = os.fspath(path)
    return (STDIN_NAME, _read_stdin()) if name == "-" else (name, read_bytes(name))


def read_bytes(name: str) -> bytes:
    """Return the content of a file of at most 64 MiB; raises ReadError."""
    try:
        if Path(name).is_dir():
            raise ReadError(name, "it is a directory", "name the file in it")
        with Path(name).open("rb") as stream:
            return _limit(stream.read(MAX_BYTES + 1), name)
    except OSError as error:
        raise ReadError(name, (error.strerror or str(error)).lower(), _suggest_path(name, error)) from error
    except ValueError as error:
        raise ReadError(repr(name), str(error), "write a plain path") from error


def _read_stdin() -> bytes:
    try:
        return _limit(sys.stdin.buffer.read(MAX_BYTES + 1), STDIN_NAME)
    except (OSError, AttributeError) as error:
        raise ReadError(STDIN_NAME, "standard input is closed", "pipe a table into it") from error


def _limit(data: bytes, source: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise ReadError(source, f"it is larger than {MAX_BYTES // 1024**2} MiB", "rank tables are smaller than that")
    return data


def _suggest_path(name: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"check the path; the current directory is {Path.cwd()}"
            if not Path(name).is_absolute()
            else "check the path"
        )
    return "make it readable for this user" if isinstance(error, PermissionError) else ""
