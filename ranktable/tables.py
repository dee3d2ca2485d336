"""Tables out of files and into them, and what a file is."""

from __future__ import annotations

import os

from ranktable.document import Document, parse_document, read_document
from ranktable.errors import BuildError, InvalidTableError, NotReadyError, UnknownDialectError, UnsupportedDialectError
from ranktable.files import DEFAULT_MODE, write_bytes
from ranktable.kinds import Detection, detect_dialect, dialect_of, find_near_keys, written_names
from ranktable.model import INITIALIZING, Entry, RankTable, encode
from ranktable.values import render_json


def detect_table(document: Document) -> Detection:
    """Return the dialect of the document and its evidence; raises UnsupportedDialectError, UnknownDialectError."""
    detection = detect_dialect(document.value)
    if detection is None:
        near = list(find_near_keys(document.value).items())[:6]
        renames = ", ".join(f"{written!r} to {meant!r}" for written, meant in near)
        remedy = f"rename {renames}" if renames else "a version 1.0 table has 'server_list' at its top"
        raise UnknownDialectError(document.source, list(document.value), remedy)
    kind = detection.dialect
    if kind.schema is None:
        raise UnsupportedDialectError(document.source, kind.title, detection.evidence, kind.instead)
    return detection


def decode_table(document: Document) -> RankTable:
    """Return the table of a document. Its values may still break rules: see `validate_table`.

    Raises UnsupportedDialectError, UnknownDialectError, InvalidTableError (with every fault of the structure), and
    NotReadyError when the structure is unfinished and the status says so.
    """
    kind = detect_table(document).dialect
    found = [*document.repeated_keys, *kind.check_structure(document.value)]
    faults = [problem for problem in found if problem.is_error]
    if not faults:
        return kind.read(Entry(members=document.value), kind)
    if document.value.get("status") == INITIALIZING:
        raise NotReadyError(document.source)
    raise InvalidTableError(document.source, faults)


def encode_document(table: RankTable) -> dict[str, object]:
    """Return the JSON object of `table` in its dialect; decoding it gives `table` again.

    Raises BuildError for a dialect that is only read, and for something that the dialect has no place for.
    """
    if table.dialect not in written_names():
        remedy = f"convert it to one of {', '.join(written_names())}"
        raise BuildError(f"a table of {dialect_of(table.dialect).title} cannot be written", remedy)
    has_pods = bool(table.super_pods) or any(device.super_device_id is not None for _, device in table.placements)
    if has_pods and not dialect_of(table.dialect).reads_super_pods:
        message = f"a table with super pods or super device ids cannot be written in dialect {table.dialect!r}"
        raise BuildError(message, "take them out, or choose a dialect that has them")
    return encode(table)


def encode_table(table: RankTable) -> str:
    """Return `table` as JSON text, one line per device; raises BuildError as `encode_document` does."""
    return render_json(encode_document(table))


def write_table(path: str | os.PathLike[str], table: RankTable, *, mode: int = DEFAULT_MODE) -> None:
    """Write `table` to `path`, whole or not at all, with exactly the permissions `mode`; raises WriteError.

    A device or a named pipe is written into; of a symbolic link the target is written.
    """
    write_bytes(path, encode_table(table).encode("ascii"), mode=mode)


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
