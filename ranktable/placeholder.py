"""Recognises what stands in a table instead of a value: masks, placeholders of documentation, marks of failed tools."""

from __future__ import annotations

import re

_FAILED_TOOL = re.compile(r"[-.\s]*-[-.\s]*")
_MASKED_NUMBERS = re.compile(r"(?:\d{1,3}|x{1,4})(?:[.:](?:\d{1,3}|x{1,4}))+|x{2,}", re.IGNORECASE)
_BRACKETED = re.compile(r"[<{\[(].*[>}\])]|\$\{?\w+\}?|.*[<{].*[>}].*", re.DOTALL)
_WORDS = re.compile(r"your[ _-].*|todo|tbd|n/?a|none|null|ip|(?:server|device|host)_?(?:id|ip)(?:_\d+)?", re.IGNORECASE)


def name_placeholder(text: str) -> str | None:
    """Return what `text` is ("a mask", "a placeholder", ...) when it stands for a value left out, else None.

    >>> name_placeholder("10.*.*.*")
    'a mask'
    >>> name_placeholder("10.0.0.9") is None
    True
    """
    if "*" in text:
        return "a mask"
    if _FAILED_TOOL.fullmatch(text):
        return "the mark of a tool that could not read the value"
    if "x" in text.lower() and _MASKED_NUMBERS.fullmatch(text):
        return "a mask"
    if "..." in text:
        return "an elision"
    if _BRACKETED.fullmatch(text) or _WORDS.fullmatch(text):
        return "a placeholder"
    return None
