"""Rank tables to JSON and back, one module per dialect: what a dialect can do, and tables out of files and into them.

A new dialect is a module with `CODECS`, and one line in `_MODULES`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from ranktable.codec.detect import COMPRESSED, Detection, Dialect, detect_dialect, find_near_keys
from ranktable.codec.schema import Schema
from ranktable.errors import (
    EXIT_PROBLEMS,
    EXIT_VALID,
    BuildError,
    InvalidTableError,
    NotReadyError,
    UnknownDialectError,
    UnsupportedDialectError,
)
from ranktable.files import DEFAULT_MODE, read_source, write_bytes
from ranktable.model import INITIALIZING, RankTable, paused_collector
from ranktable.problem import Problem
from ranktable.reading.document import Document, parse_document, read_document
from ranktable.reading.foreign import name_compression
from ranktable.survey import Survey
from ranktable.text import render_json

_MODULES = {
    **dict.fromkeys(("1.0", "1.2", "volcano-job", "volcano-global", "cross-cluster"), "server_list"),
    "mindie-global": "mindie_global",
    "template2-cloud": "template2",
    "template2-lab": "template2",
    **dict.fromkeys(("1.1", "1.1-offline"), "server_list"),
    "2.0": "v2_0",
}
"""Module of each dialect that can be read and written; its `CODECS` has it. Loaded when it is first asked for."""
_MAX_RENAMES = 6


@dataclass(frozen=True, slots=True)
class Codec:
    """The schema of a dialect and its four functions."""

    schema: Schema
    """What its top consists of, and everything below it."""
    check_structure: Callable[[Mapping[str, object]], list[Problem]]
    """Every fault that keeps the object from being decoded (errors), and what is odd about its keys (warnings)."""
    survey: Callable[[Mapping[str, object]], Survey]
    """What can be read of the object, however faulty it is."""
    decode: Callable[[Mapping[str, object]], RankTable]
    """The table of an object that `check_structure` finds no error in."""
    encode: Callable[[RankTable], dict[str, object]]
    """The object of a table; decoding it gives an equal table."""


def codec_names() -> tuple[str, ...]:
    """Return the short names of the dialects that have a codec."""
    return tuple(_MODULES)


def codec_of(dialect: str) -> Codec | None:
    """Return the codec of a dialect by its short name, None when it has none."""
    if dialect not in _MODULES:
        return None
    codec: Codec = import_module(f"ranktable.codec.{_MODULES[dialect]}").CODECS[dialect]
    return codec


def find_codec(document: Document) -> tuple[Dialect, Codec]:
    """Return the dialect of the document and its codec; raises what `detect_codec` does."""
    detection, codec = detect_codec(document)
    return detection.dialect, codec


def detect_codec(document: Document) -> tuple[Detection, Codec]:
    """Return the dialect of the document, with what gave it away, and its codec.

    Raises UnsupportedDialectError for a known dialect without a codec, UnknownDialectError for anything else.
    """
    detection = detect_dialect(document.value)
    if detection is None:
        raise UnknownDialectError(document.source, list(document.value), suggest_keys(document.value))
    codec = codec_of(detection.dialect.name)
    if codec is None:
        default = f"give it to its own reader ({detection.dialect.consumer}), or write the job as version 1.0"
        remedy = detection.dialect.instead or default
        raise UnsupportedDialectError(document.source, detection.dialect.title, detection.evidence, remedy)
    return detection, codec


def decode_table(document: Document) -> RankTable:
    """Return the table of a document. Its values may still break rules: see `validate_table`.

    Raises UnsupportedDialectError, UnknownDialectError, InvalidTableError (with every fault of the structure), and
    NotReadyError when the structure is unfinished and the status says so.
    """
    _, codec = find_codec(document)
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
    return _codec_to_write(table).encode(table)


def encode_table(table: RankTable) -> str:
    """Return `table` as JSON text, one line per device; raises BuildError for an unknown dialect."""
    return render_json(encode_document(table))


def examine_table(table: RankTable) -> tuple[list[Problem], Survey]:
    """Return the faults of structure and the survey of a table in memory, with the paths that its file would have.

    Raises BuildError for an unknown dialect.
    """
    codec = _codec_to_write(table)
    value = codec.encode(table)
    return codec.check_structure(value), codec.survey(value)


def _codec_to_write(table: RankTable) -> Codec:
    codec = codec_of(table.dialect)
    if codec is None:
        raise BuildError(f"dialect {table.dialect!r} cannot be written", f"use one of {', '.join(codec_names())}")
    return codec


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
    """What one file is."""

    source: str
    dialect: str | None = None
    """Short name of the kind, None when the file is none that is known."""
    title: str = "no rank table of any known kind"
    evidence: str = ""
    """The keys or bytes that gave it away."""
    consumer: str = ""
    """Who reads files of this kind."""
    is_supported: bool = False
    """True when this package reads, validates and converts the kind; else it only knows its name."""
    advice: str = ""
    """What to do with a file that is not supported."""

    @property
    def exit_code(self) -> int:
        """0 for a kind that is known, 1 for any other."""
        return EXIT_PROBLEMS if self.dialect is None else EXIT_VALID


def detect_file(path: str | os.PathLike[str]) -> FileKind:
    """Return what the file at `path` is; `-` is standard input.

    Raises ReadError for a file that cannot be opened, JsonTextError for text that is neither JSON nor compressed.
    """
    name, data = read_source(path)
    compression = name_compression(data)
    if compression is not None:
        return _describe_kind(name, Detection(COMPRESSED, f"the first bytes of {compression}"))
    value = parse_document(data, name).value
    detection = detect_dialect(value)
    if detection is None:
        shown = ", ".join(key[:60] for key in list(value)[:6]) or "none"
        return FileKind(name, evidence=f"top-level keys: {shown}", advice=suggest_keys(value))
    return _describe_kind(name, detection)


def _describe_kind(source: str, detection: Detection) -> FileKind:
    kind = detection.dialect
    is_supported = codec_of(kind.name) is not None
    advice = "" if is_supported else kind.instead or f"give it to its own reader ({kind.consumer})"
    return FileKind(source, kind.name, kind.title, detection.evidence, kind.consumer, is_supported, advice)
