"""Recognises what stands in a table instead of a value: masks, placeholders of documentation, marks of failed tools.

A host may be called nearly anything, so a name that DNS allows is taken for a placeholder only when it is one of a few
words, or nothing but numbers and x. Source: samples of documentation and tables posted with questions in public.
"""

from __future__ import annotations

import re

_MAX_LENGTH = 256
"""Longer texts are no masks; it also bounds the time that the patterns take."""

_FAILED_TOOL = re.compile(r"[-.\s]*-[-.\s]*")
_MASKED_NUMBERS = re.compile(
    r"(?:\d{1,3}|x{1,4})(?:[.:](?:\d{1,3}|x{1,4}))+|x{2,}|\d{1,3}(?:[._]\d{1,3}){1,2}[._][a-z]|(?:\d{1,3}_|x{1,3}_)+x{1,3}",
    re.IGNORECASE,
)
_BRACKETED = re.compile(
    r"[<{(].*[>})]|\[[^:]*\]|\$[{(]?\w+[)}]?|.*[<{].*[>}].*|%\w+%|@\w+@|__\w+__", re.IGNORECASE | re.DOTALL
)
_RANGE = re.compile(r".*\[\d+[-,]\d+.*\].*", re.DOTALL)
_WORDS = re.compile(
    r"your[ _-](?:server|host|node|machine|device|pod|ip|id|address|name)\b.*|your_.*|todo|tbd|fixme|n/a|none|null|ip"
    r"|unknown|undefined|(?:change|replace)[ _-]?me|[a-z]+_(?:ip|addr|address)(?:_?\d+)?|ip_(?:addr|address|\d+)"
    r"|(?:server|device|host)_id(?:_\d+)?",
    re.IGNORECASE,
)


def name_placeholder(text: str) -> str | None:
    """Return what `text` is ("a mask", "a placeholder", ...) when it stands for a value left out, else None.

    >>> name_placeholder("10.*.*.*")
    'a mask'
    >>> name_placeholder("10.0.0.9") is None
    True
    """
    if len(text) > _MAX_LENGTH:
        return None
    if "*" in text or "?" in text:
        return "a mask"
    if _FAILED_TOOL.fullmatch(text):
        return "the mark of a tool that could not read the value"
    if _MASKED_NUMBERS.fullmatch(text) and not text.replace(".", "").replace(":", "").isdigit():
        return "a mask"
    if "..." in text or "\u2026" in text:
        return "an elision"
    if _RANGE.fullmatch(text):
        return "a range that was not expanded"
    if _BRACKETED.fullmatch(text) or _WORDS.fullmatch(text):
        return "a placeholder"
    return None
