"""How values are read and written: numbers, addresses, what stands there instead of a value; names, nouns and JSON.

A name that DNS allows is taken for a placeholder only when it is one of a few words, or nothing but numbers and x.
Source: samples of documentation and tables posted with questions in public.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket

from ranktable.problem import show_value

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_INTEGER = 2**32 - 1
is_decimal = re.compile(r"0|[1-9][0-9]{0,9}").fullmatch
_MAX_LENGTH = 256
"""Longer texts are no masks; it also bounds the time that the patterns take."""
_FAILED_TOOL = r"[-.\s]*-[-.\s]*"
_MASKED_NUMBERS = (
    r"(?i)(?:\d{1,3}|x{1,4})(?:[.:](?:\d{1,3}|x{1,4}))+|x{2,}|\d{1,3}(?:[._]\d{1,3}){1,2}[._][a-z]"
    r"|(?:\d{1,3}_|x{1,3}_)+x{1,3}"
)
_BRACKETED = r"(?is)[<{(].*[>})]|\[[^:]*\]|\$[{(]?\w+[)}]?|.*[<{].*[>}].*|%\w+%|@\w+@|__\w+__"
_RANGE = r"(?s).*\[\d+[-,]\d+.*\].*"
_WORDS = (
    r"(?i)your[ _-](?:server|host|node|machine|device|pod|ip|id|address|name)\b.*|your_.*|todo|tbd|fixme|n/a|none|null"
    r"|ip|unknown|undefined|(?:change|replace)[ _-]?me|[a-z]+_(?:ip|addr|address)(?:_?\d+)?|ip_(?:addr|address|\d+)"
    r"|(?:server|device|host)_id(?:_\d+)?"
)

_INDENT = "  "
_MAX_LINE = 120


def parse_number(value: object) -> int | None:
    """Return the number in a decimal string of at most ten digits, or in a JSON integer; None for all else."""
    if isinstance(value, str):
        return int(value) if is_decimal(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**10 else None


def parse_address(text: str) -> Address | None:
    """Return the IPv4 or IPv6 address in `text`, None when it is none."""
    try:
        # The system's parser takes the same IPv4 addresses as ipaddress does, in a fifth of the time.
        return ipaddress.IPv4Address(socket.inet_pton(socket.AF_INET, text))
    except (OSError, ValueError):
        pass
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def is_loopback(text: str) -> bool:
    """Return whether a text is an address of the loopback port, or its name."""
    address = parse_address(text)
    return text == "localhost" if address is None else address.is_loopback


def name_placeholder(text: str) -> str | None:
    """Return what `text` is ("a mask", "a placeholder", ...) when it stands for a value left out, else None."""
    if len(text) > _MAX_LENGTH:
        return None
    if "*" in text or "?" in text:
        return "a mask"
    if re.fullmatch(_FAILED_TOOL, text):
        return "the mark of a tool that could not read the value"
    if re.fullmatch(_MASKED_NUMBERS, text) and not text.replace(".", "").replace(":", "").isdigit():
        return "a mask"
    if "..." in text or "\u2026" in text:
        return "an elision"
    if re.fullmatch(_RANGE, text):
        return "a range that was not expanded"
    if re.fullmatch(_BRACKETED, text) or re.fullmatch(_WORDS, text):
        return "a placeholder"
    return None


def plain(text: str) -> str:
    """Return text that is safe to print: JSON escapes for what is not printable ASCII."""
    return text if text.isascii() and text.isprintable() else show_value(text)


def count_noun(number: int, noun: str) -> str:
    """Return `1 server`, `2 servers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def render_json(value: object) -> str:
    """Return `value` as JSON in ASCII that ends with a line break."""
    return _render(value, "") + "\n"


def _render(value: object, margin: str) -> str:
    if not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    if not any(isinstance(member, dict | list) for member in (value.values() if isinstance(value, dict) else value)):
        line = json.dumps(value)
        if len(margin) + len(line) <= _MAX_LINE:
            return line
    inner = margin + _INDENT
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_render(member, inner)}" for key, member in value.items()]
        opening, closing = "{", "}"
    else:
        parts = [_render(item, inner) for item in value]
        opening, closing = "[", "]"
    body = f",\n{inner}".join(parts)
    return f"{opening}\n{inner}{body}\n{margin}{closing}"
