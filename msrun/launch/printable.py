"""Text that others have written, made safe for a terminal: the one place where control sequences are taken out.

A worker, another host or a file may send a terminal what moves its cursor, changes its title, writes the clipboard or
turns the direction of text. Every sink of such text goes through `printable`: what msrun says, the lines of workers,
excerpts of logs, the status.
"""

from __future__ import annotations

import re
import unicodedata

_CSI = r"\x1b\[[0-?]*[ -/]*[@-~]"
_SUSPECT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_PLAIN = bytes([0x09, 0x0A, *range(0x20, 0x7F)])
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m\Z")
_UNSAFE = re.compile(rf"{_CSI}|{_SUSPECT.pattern}")
_RESET = "\x1b[0m"
_COLOURS = re.compile(r"(\x1b\[[0-9;:]*m)")


def printable(text: str, *, keep_colours: bool = False) -> str:
    """Return text that a terminal only shows. Line ends and tabs stay.

    Sequences that move the cursor or erase (CSI) are left out; other control characters (C0, C1, DEL), line and
    paragraph separators and those that override the direction of text are shown escaped, as \\x1b and so on.

    Args:
        keep_colours: let sequences that set colours (SGR) stay; they end with the line.
    """
    if not _SUSPECT.search(text):
        return text
    if not keep_colours:
        return _UNSAFE.sub(_escape, text)
    return "\n".join(map(_with_colours, text.split("\n")))


def printable_bytes(data: bytes, *, keep_colours: bool = False) -> bytes:
    """Return the same of bytes, as UTF-8; those that are no UTF-8 are shown escaped."""
    if not data.translate(None, _PLAIN):
        return data
    return printable(data.decode("utf-8", "backslashreplace"), keep_colours=keep_colours).encode()


def one_line(text: str) -> str:
    """Return text that stays in its line, for names and reasons; all that is not printable is shown escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in printable(text))


def fit(text: str, columns: int) -> str:
    """Return as much of a printable line as a terminal shows in so many columns; colours take none, and stay."""
    shown: list[str] = []
    for part in _COLOURS.split(text):
        if part.startswith("\x1b"):
            shown.append(part)
            continue
        for char in part:
            columns -= 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
            if columns >= 0:
                shown.append(char)
    return "".join(shown)


def _escape(match: re.Match[str]) -> str:
    return "" if len(match[0]) > 1 else ascii(match[0])[1:-1]


def _with_colours(line: str) -> str:
    has_colour = False

    def escape(match: re.Match[str]) -> str:
        nonlocal has_colour
        if _COLOUR.match(match[0]):
            has_colour = True
            return match[0]
        return _escape(match)

    shown = _UNSAFE.sub(escape, line)
    return shown + _RESET if has_colour else shown
