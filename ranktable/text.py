"""How values are written: names that are safe to print, counted nouns, JSON that a person can read."""

from __future__ import annotations

import json

from ranktable.problem import show_value

_INDENT = "  "
_MAX_LINE = 120


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
    if _is_flat(value):
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


def _is_flat(value: dict[str, object] | list[object]) -> bool:
    members = value.values() if isinstance(value, dict) else value
    return not any(isinstance(member, dict | list) for member in members)
