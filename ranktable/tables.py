"""Tables out of files and into them, and what a file is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ranktable.errors import (
    InvalidTableError,
    JsonTextError,
    NotReadyError,
    UnknownDialectError,
    UnsupportedDialectError,
)
from ranktable.files import DEFAULT_MODE, write_bytes
from ranktable.kinds import Codec, Detection, Dialect, Survey, codec_of, detect_dialect, dialect_of, find_near_keys
from ranktable.model import INITIALIZING, RankTable, paused_collector
from ranktable.problem import Problem
from ranktable.reading.document import Document, parse_document, read_document
from ranktable.reading.faults import name_compression
from ranktable.text import render_json

_MAX_RENAMES = 6


def detect_codec(document: Document) -> tuple[Detection, Codec]:
    """Return the dialect of the document, with what gave it away, and its codec.

    Raises UnsupportedDialectError for a known dialect without a codec, UnknownDialectError for anything else.
    """
    detection = detect_dialect(document.value)
    if detection is None:
        raise UnknownDialectError(document.source, list(document.value), suggest_keys(document.value))
    kind = detection.dialect
    if kind.codec is None:
        raise UnsupportedDialectError(document.source, kind.title, detection.evidence, kind.instead)
    return detection, kind.codec


def decode_table(document: Document) -> RankTable:
    """Return the table of a document. Its values may still break rules: see `validate_table`.

    Raises UnsupportedDialectError, UnknownDialectError, InvalidTableError (with every fault of the structure), and
    NotReadyError when the structure is unfinished and the status says so.
    """
    _, codec = detect_codec(document)
    repeated = [describe_repeat(repeat.path) for repeat in document.repeated_keys]
    faults = [*repeated, *(problem for problem in codec.check_structure(document.value) if problem.is_error)]
    if not faults:
        return codec.decode(document.value)
    if document.value.get("status") == INITIALIZING:
        raise NotReadyError(document.source)
    raise InvalidTableError(document.source, faults)


def describe_repeat(path: str) -> Problem:
    """Return the finding of rule R32 for a repeated key."""
    message = "the key stands twice in its object; parsers keep the last one silently"
    return Problem(path, "R32", "error", message, "keep one of the two")


def encode_document(table: RankTable) -> dict[str, object]:
    """Return the JSON object of `table` in its dialect; raises BuildError for an unknown dialect."""
    return codec_of(table.dialect).encode(table)


def encode_table(table: RankTable) -> str:
    """Return `table` as JSON text, one line per device; raises BuildError for an unknown dialect."""
    return render_json(encode_document(table))


def examine_table(table: RankTable) -> tuple[list[Problem], Survey]:
    """Return the faults of structure and the survey of a table in memory, with the paths that its file would have.

    Raises BuildError for an unknown dialect.
    """
    codec = codec_of(table.dialect)
    value = codec.encode(table)
    return codec.check_structure(value), codec.survey(value)


def suggest_keys(value: Mapping[str, object]) -> str:
    """Return what to do about an object that has no telling key of any dialect."""
    near = list(find_near_keys(value).items())[:_MAX_RENAMES]
    renames = [f"{written!r} to {meant!r}" for written, meant in near]
    return f"rename {', '.join(renames)}" if renames else "a version 1.0 table has 'server_list' at its top"


def write_table(path: str | os.PathLike[str], table: RankTable, *, mode: int = DEFAULT_MODE) -> None:
    """Write `table` to `path` with exactly the permissions `mode`, whatever the umask.

    The text goes to a temporary name in the same folder, is made durable, then takes the place of `path`; of a symbolic
    link, that of its target. A device or a named pipe is written into. Raises WriteError; the file that was there
    before is then untouched.
    """
    write_bytes(path, encode_table(table).encode("ascii"), mode=mode)


@paused_collector()
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


@dataclass(frozen=True, slots=True)
class FileKind:
    """What one file is that is known by name only."""

    source: str
    dialect: Dialect
    evidence: str
    """The keys or bytes that gave it away."""


def find_kind(data: bytes, source: str) -> FileKind | None:
    """Return what the bytes are when they are known and no table that can be read here, else None."""
    compression = name_compression(data)
    if compression is not None:
        return FileKind(source, dialect_of("compressed"), f"the first bytes of {compression}")
    try:
        detection = detect_dialect(parse_document(data, source).value)
    except JsonTextError:
        return None
    if detection is None or detection.dialect.codec:
        return None
    return FileKind(source, detection.dialect, detection.evidence)
