"""Reads rank tables from files, from standard input and from text."""

from __future__ import annotations

import os

from ranktable.codec import decode_table
from ranktable.collector import paused_collector
from ranktable.errors import NotReadyError
from ranktable.model import INITIALIZING, RankTable
from ranktable.reading.document import parse_document
from ranktable.reading.source import read_document


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
