"""JSON text that a person can read: an object without nested containers stands on one line when it fits."""

from __future__ import annotations

import json

_INDENT = "  "
_MAX_LINE = 120


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
