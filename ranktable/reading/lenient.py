"""Reads JSON that hands and programs have damaged in ways that leave no doubt about what is meant.

Repaired are: other Unicode encodings and byte order marks, comments, commas after the last item, single and
typographic quotes, True, False and None. Not repaired, because a person must say what belongs there: elisions (...),
text that ends in the middle, missing commas and brackets. Text that is JSON already is never touched.
Source: pasted samples of documentation, which have comments and trailing commas, and printed Python objects.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from ranktable.errors import JsonTextError
from ranktable.problem import Position
from ranktable.reading.document import Document, parse_document
from ranktable.reading.positions import Lines

# No possessive quantifiers: Python 3.11.2 matches groups under them wrongly. Each piece can match in one way only, so
# that nothing is tried again and again.
_COMMENT = r"//[^\n]*(?=\n|\Z)|\#[^\n]*(?=\n|\Z)|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/"
_TOKEN = re.compile(
    rf"""
    (?P<string>"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z))
    |(?P<comment>{_COMMENT})
    |(?P<open_comment>/\*.*)
    |(?P<last_comma>,(?=\s*(?:(?:{_COMMENT})\s*)*[}}\]]))
    |'(?P<single>[^'\\\n]*(?:\\[^\n][^'\\\n]*)*)(?P<closed>'?)
    |\u201c(?P<double_typographic>[^"\u201c\u201d\n]*)\u201d
    |\u2018(?P<single_typographic>[^'\u2018\u2019\n]*)\u2019
    |(?<!\w)(?P<word>True|False|None)\b
    """,
    re.DOTALL | re.VERBOSE,
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_QUOTES_WITHIN = re.compile(r'\\.|"', re.DOTALL)
_BOMS = (
    (codecs.BOM_UTF8, "utf-8", "a byte order mark"),
    (codecs.BOM_UTF32_LE, "utf-32-le", "UTF-32"),
    (codecs.BOM_UTF32_BE, "utf-32-be", "UTF-32"),
    (codecs.BOM_UTF16_LE, "utf-16-le", "UTF-16"),
    (codecs.BOM_UTF16_BE, "utf-16-be", "UTF-16"),
)
_MAX_SHOWN = 40


@dataclass(frozen=True, slots=True)
class TextRepair:
    """One repaired place of a text; None for the position of the whole file, "" for text that was taken out."""

    position: Position | None
    before: str
    after: str


def parse_leniently(data: bytes, source: str = "<bytes>") -> tuple[Document, tuple[TextRepair, ...]]:
    """Return the JSON object in `data`, and what had to be repaired to read it: nothing for what is JSON in UTF-8.

    Raises JsonTextError for what cannot be repaired, with its line in the text as it was.
    """
    plain, repairs = _to_utf8(data)
    try:
        return parse_document(plain, source), repairs
    except JsonTextError as error:
        try:
            repaired, text_repairs = repair_text(plain.decode("utf-8"))
        except UnicodeDecodeError:
            raise error from None
    return parse_document(repaired.encode("utf-8"), source), (*repairs, *text_repairs)


def repair_text(text: str) -> tuple[str, tuple[TextRepair, ...]]:
    """Return the text with its mistakes repaired, line by line where it was, and the repairs; JSON stays as it is."""
    lines = Lines(text)
    repairs: list[TextRepair] = []
    pieces: list[str] = []
    end, last = 0, ""
    for match in _TOKEN.finditer(text):
        between = text[end : match.start()]
        last = between.rstrip()[-1:] or last
        before, end = match.group(), match.end()
        # A comma after an opening bracket or another comma stands for an entry that is not there.
        after = before if match["last_comma"] and last in "[{," else _repair(match)
        pieces += [between, after]
        if not match["comment"]:
            last = before[-1:]
        if after != before:
            shown = "" if after.isspace() or not after else _shorten(after)
            repairs.append(TextRepair(lines.position_at(match.start()), _shorten(before), shown))
    return "".join([*pieces, text[end:]]), tuple(repairs)


def _repair(match: re.Match[str]) -> str:
    """Return what belongs in the place of a token; comments leave blanks so that columns stay."""
    if match["comment"]:
        return re.sub(r"[^\n]", " ", match.group())
    if match["last_comma"]:
        return " "
    if match["word"]:
        return _WORDS[match["word"]]
    if match["single"] is not None and not match["closed"]:
        return match.group()
    kinds = ("single", "double_typographic", "single_typographic")
    content = next((match[kind] for kind in kinds if match[kind] is not None), None)
    return match.group() if content is None else f'"{_QUOTES_WITHIN.sub(_escape, content)}"'


def _escape(match: re.Match[str]) -> str:
    return {"\\'": "'", '"': '\\"'}.get(match.group(), match.group())


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _to_utf8(data: bytes) -> tuple[bytes, tuple[TextRepair, ...]]:
    """Return the bytes in UTF-8 without a byte order mark; what cannot be decoded is returned as it is."""
    for mark, encoding, name in _BOMS:
        if data.startswith(mark):
            return _transcode(data, data[len(mark) :], encoding, name)
    if data[1:2] == b"\0" and data[:1] != b"\0":
        return _transcode(data, data, "utf-32-le" if data[2:4] == b"\0\0" else "utf-16-le", "UTF without a mark")
    if data[:1] == b"\0":
        return _transcode(data, data, "utf-32-be" if data[1:2] == b"\0" else "utf-16-be", "UTF without a mark")
    return data, ()


def _transcode(data: bytes, body: bytes, encoding: str, name: str) -> tuple[bytes, tuple[TextRepair, ...]]:
    try:
        return body.decode(encoding).encode("utf-8"), (TextRepair(None, name, "UTF-8"),)
    except UnicodeError:
        return data, ()
