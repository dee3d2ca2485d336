"""Says in plain words why a text is not JSON: which of the usual mistakes it is, and where it really stands."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

_LAST_COMMA = re.compile(r",\s*\Z")
_SAYS_TRUNCATED = "Unterminated string"


class Fault(NamedTuple):
    """Where a text stops to be JSON, why, and what to do."""

    offset: int
    message: str
    remedy: str


def explain_fault(text: str, error: json.JSONDecodeError) -> Fault:
    """Return the fault behind `error`; its place is that of the mistake, not where the parser gave up."""
    offset = error.pos
    rest = text[offset : offset + 8]
    comma = _LAST_COMMA.search(text[max(0, offset - 4096) : offset])
    if not text.strip():
        return Fault(0, "the file is empty", "write the table again")
    if error.msg.startswith("Illegal trailing comma"):
        return _trailing_comma(offset)
    if comma and rest[:1] in ("}", "]"):
        return _trailing_comma(offset - len(comma.group()))
    if offset >= len(text.rstrip()) or error.msg.startswith(_SAYS_TRUNCATED):
        return Fault(offset, "the text ends in the middle of the table", "copy or write the whole file again")
    return _explain_character(offset, rest, error.msg)


def _trailing_comma(offset: int) -> Fault:
    return Fault(offset, "a comma stands after the last item, which JSON does not allow", "remove the comma")


def _explain_character(offset: int, rest: str, parser_says: str) -> Fault:
    if rest.startswith(("//", "/*", "#")):
        return Fault(offset, "a comment stands here, which JSON does not allow", "remove the comment")
    if rest.startswith(("...", "\u2026")):
        return Fault(offset, "an elision (...) stands here instead of entries", "write the entries that it leaves out")
    if rest[:1] in "'\u2018\u2019\u201c\u201d":
        return Fault(offset, "a quotation mark stands here that JSON does not know", 'use the plain double quote "')
    if rest.startswith(("True", "False", "None", "NaN", "Infin", "-Infin")):
        return Fault(offset, f"{rest.split(',')[0].strip()} is no JSON value", "write a string in double quotes")
    if parser_says.startswith("Extra data"):
        return Fault(offset, "text follows after the end of the table", "keep one JSON object in the file")
    if parser_says.startswith("Expecting ',' delimiter"):
        return Fault(offset, "a comma or a closing bracket is missing before this place", "add it")
    if parser_says.startswith("Invalid control character"):
        return Fault(offset, "a line break or control character stands inside a string", "close the string before it")
    return Fault(offset, f"the text is not JSON here ({parser_says})", "correct the text at this place")
