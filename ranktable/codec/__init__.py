"""Rank tables to JSON and back, one module per dialect, behind two functions.

A new dialect is a module with a `CODEC`, and one line in `ranktable.codec.codec`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ranktable.codec.codec import Codec, codec_names, codec_of
from ranktable.codec.detect import Detection, Dialect, detect_dialect, find_near_keys
from ranktable.codec.layout import render_json
from ranktable.errors import BuildError, InvalidTableError, NotReadyError, UnknownDialectError, UnsupportedDialectError
from ranktable.model import INITIALIZING, RankTable
from ranktable.problem import Problem
from ranktable.reading.document import Document
from ranktable.survey import Survey

_MAX_RENAMES = 6


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
