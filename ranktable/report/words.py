"""Numbers with their nouns, and text from files that is safe to print."""

from __future__ import annotations

from ranktable.problem import show_value


def plain(text: str) -> str:
    """Return text that is safe to print: JSON escapes for what is not printable ASCII."""
    return text if text.isascii() and text.isprintable() else show_value(text)


def count_noun(number: int, noun: str) -> str:
    """Return `1 server`, `2 servers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
