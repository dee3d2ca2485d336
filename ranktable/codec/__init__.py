"""Rank tables to JSON and back, one module per dialect, behind two functions.

A new dialect is a module with the four functions of `Codec` and one line in `_CODECS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from ranktable.codec import v1_0
from ranktable.codec.detect import Dialect, detect_dialect
from ranktable.codec.layout import render_json
from ranktable.document import Document
from ranktable.errors import BuildError, InvalidTableError, NotReadyError, UnknownDialectError, UnsupportedDialectError
from ranktable.model import INITIALIZING, RankTable
from ranktable.problem import Problem
from ranktable.survey import Survey


@dataclass(frozen=True, slots=True)
class Codec:
    """What a dialect can do; each function is documented in `ranktable.codec.v1_0`."""

    check_structure: Callable[[Mapping[str, object]], list[Problem]]
    survey: Callable[[Mapping[str, object]], Survey]
    decode: Callable[[Mapping[str, object]], RankTable]
    encode: Callable[[RankTable], dict[str, object]]


_CODECS = {v1_0.VERSION: Codec(v1_0.check_structure, v1_0.survey, v1_0.decode, v1_0.encode)}


def find_codec(document: Document) -> tuple[Dialect, Codec]:
    """Return the dialect of the document and its codec.

    Raises UnsupportedDialectError for a known dialect without a codec, UnknownDialectError for anything else.
    """
    detection = detect_dialect(document.value)
    if detection is None:
        raise UnknownDialectError(document.source, list(document.value), _suggest(document))
    codec = _CODECS.get(detection.dialect.name)
    if codec is None:
        remedy = f"give it to its own reader ({detection.dialect.consumer}), or write the job as version 1.0"
        raise UnsupportedDialectError(document.source, detection.dialect.title, detection.evidence, remedy)
    return detection.dialect, codec


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
    """Return the JSON object of `table`, in the dialect of its version; raises BuildError for an unknown version."""
    codec = _CODECS.get(table.version)
    if codec is None:
        raise BuildError(f"version {table.version!r} cannot be written", f"use one of {', '.join(_CODECS)}")
    return codec.encode(table)


def encode_table(table: RankTable) -> str:
    """Return `table` as JSON text, one line per device; raises BuildError for an unknown version."""
    return render_json(encode_document(table))


def examine_table(table: RankTable) -> tuple[list[Problem], Survey]:
    """Return the faults of structure and the survey of a table in memory, with the paths that its file would have.

    Raises BuildError for an unknown version.
    """
    value = encode_document(table)
    codec = _CODECS[table.version]
    return codec.check_structure(value), codec.survey(value)


def _suggest(document: Document) -> str:
    near = [key for key in document.value if get_close_matches(key.lower(), ("server_list", "serverlist"), cutoff=0.75)]
    return f"rename {near[0]!r} to 'server_list'" if near else "a version 1.0 table has 'server_list' at its top"
