"""Says in plain words why a text is not JSON: which of the usual mistakes it is, and where it really stands."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ranktable.reading.foreign import name_text

_LAST_COMMA = re.compile(r",\s*\Z")
_SAYS_TRUNCATED = "Unterminated string"
_BARE_KEY = re.compile(r"[A-Za-z_][\w-]*\s*:")
_QUOTE_IT = "write a string in double quotes"

# What the text looks like where the parser gave up, in the order of the tests.
_LOOKS = tuple(
    (re.compile(pattern), message, remedy)
    for pattern, message, remedy in (
        (r"//|/\*|#", "a comment stands here, which JSON does not allow", "remove the comment"),
        (r"\.\.|\u2026", "an elision (...) stands here instead of entries", "write the entries that it leaves out"),
        (
            r"['`\u2018\u2019\u201c\u201d]",
            "a quotation mark stands here that JSON does not know",
            'use the plain double quote "',
        ),
        (r"True|False|None", "True, False and None are no JSON values", _QUOTE_IT),
        (r"-?(?:NaN|Infinity)", "NaN and Infinity are no JSON values", _QUOTE_IT),
        (r"undefined\b", "undefined is no JSON value", _QUOTE_IT),
        (r"\{[{%]|\$\{?\w|<[\w ]+>|%\(?\w", "a placeholder of a template stands here", "fill the template in first"),
        (r"[<=>]{7}", "a mark of a merge conflict stands here", "resolve the conflict first"),
        (r"\0", "NUL bytes stand here", "write the file again; its end never reached the disk"),
        (
            r"[\u00a0\u2000-\u200f\u2028\u2029\u3000\ufeff]",
            "a blank that JSON does not know stands here",
            "use plain spaces",
        ),
        (r"[\uff0c\uff1a\uff1b\uff3b\uff3d\uff5b\uff5d]", "a full-width sign stands here", "use the plain sign"),
        (r"[-+]?(?:0[xXoObB\d]|\.\d)|[+]\d", "a number stands here that JSON does not know", _QUOTE_IT),
        (r",", "a comma stands here with nothing before it", "remove it, or write what is missing"),
        (r"[=;]", "JSON knows only : between key and value and , between members", "write the right sign"),
    )
)
_PARSER_SAYS = (
    ("Expecting property name", "a key stands here without double quotes", "put it in double quotes"),
    ("Invalid \\escape", "a backslash stands here that starts no escape of JSON", "double it, or remove it"),
    (
        "Invalid control character",
        "a line break or control character stands inside a string",
        "close the string before it",
    ),
)


class Fault(NamedTuple):
    """Where a text stops to be JSON, why, and what to do."""

    offset: int
    message: str
    remedy: str


def explain_fault(text: str, error: json.JSONDecodeError) -> Fault:
    """Return the fault behind `error`; its place is that of the mistake, not where the parser gave up."""
    offset = error.pos
    rest = text[offset : offset + 40]
    comma = _LAST_COMMA.search(text[max(0, offset - 4096) : offset])
    if not text.strip():
        return Fault(0, "the file is empty", "write the table again")
    foreign = name_text(text)
    if foreign:
        return Fault(len(text) - len(text.lstrip()), *foreign)
    if error.msg.startswith("Illegal trailing comma"):
        return _trailing_comma(offset)
    if comma and rest[:1] in ("}", "]"):
        return _trailing_comma(offset - len(comma.group()))
    if offset >= len(text.rstrip()) or error.msg.startswith(_SAYS_TRUNCATED):
        return Fault(offset, "the text ends in the middle of the table", "copy or write the whole file again")
    if text[offset - 1 : offset] == "0" and rest[:1] in tuple("0123456789xX"):
        return Fault(offset - 1, "a number stands here that JSON does not know", _QUOTE_IT)
    if text[offset - 1 : offset + 1] == "{{":
        return Fault(offset - 1, "a placeholder of a template stands here", "fill the template in first")
    return _explain_character(offset, rest, error.msg)


def _trailing_comma(offset: int) -> Fault:
    return Fault(offset, "a comma stands after the last item, which JSON does not allow", "remove the comma")


def _explain_character(offset: int, rest: str, parser_says: str) -> Fault:
    for pattern, message, remedy in _LOOKS:
        if pattern.match(rest):
            return Fault(offset, message, remedy)
    for says, message, remedy in _PARSER_SAYS:
        if parser_says.startswith(says) and (says != "Expecting property name" or _BARE_KEY.match(rest)):
            return Fault(offset, message, remedy)
    shown = ascii(rest[:1])
    if rest[:1] and not (rest[0].isascii() and rest[0].isprintable()):
        return Fault(offset, f"the character {shown} stands here, which JSON does not know", "replace it")
    if parser_says.startswith("Extra data") and rest[:1] in ("}", "]"):
        return Fault(offset, "there is a closing bracket too many", "remove it")
    if parser_says.startswith("Extra data") and rest[:1] == "{":
        return Fault(offset, "a second object follows after the table", "keep one JSON object in the file")
    if parser_says.startswith("Extra data"):
        return Fault(offset, "text follows after the end of the table", "keep one JSON object in the file")
    if rest[:1] in ("}", "]"):
        return Fault(offset, f"{rest[0]} closes what another bracket has opened", "write the bracket that fits")
    if parser_says.startswith("Expecting ',' delimiter"):
        return Fault(offset, "a comma or a closing bracket is missing before this place", "add it")
    return Fault(offset, f"the text is not JSON here ({parser_says})", "correct the text at this place")
