"""One repaired fault, and the places in a JSON value that paths name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from ranktable.problem import Position, show_value

_STEP = re.compile(r'\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]')

Holder = dict[str, object] | list[object]


@dataclass(frozen=True, slots=True)
class Repair:
    """A fault that was put right: the rule it broke, where, and what stood there before and stands there now."""

    rule: str
    path: str
    """JSON path; empty for a repair of the text, which has a position, or of the file as a whole."""
    change: str
    """What was done, such as `0 -> "0"`."""
    position: Position | None = None

    def __str__(self) -> str:
        place = self.path or (f"line {self.position.line}" if self.position else "the file")
        return f"{self.rule} {place}: {self.change}"


def replaced(before: object, after: object) -> str:
    """Return `before -> after` in JSON."""
    return f"{show_value(before)} -> {show_value(after)}"


def find_holder(value: Holder, path: str) -> tuple[Holder, str | int] | None:
    """Return the object or array that holds what is at `path`, with its key or index there; None when it is absent."""
    steps = [_read_step(match) for match in _STEP.finditer(path)]
    if not steps:
        return None
    holder: object = value
    for step in steps[:-1]:
        holder = _child(holder, step)
    last = steps[-1]
    if isinstance(holder, dict) and isinstance(last, str) and last in holder:
        return holder, last
    if isinstance(holder, list) and isinstance(last, int) and last < len(holder):
        return holder, last
    return None


def _read_step(match: re.Match[str]) -> str | int:
    plain, index, quoted = match.groups()
    if index is not None:
        return int(index)
    return plain if plain is not None else str(json.loads(quoted))


def _child(holder: object, step: str | int) -> object:
    if isinstance(holder, dict) and isinstance(step, str):
        return holder.get(step)
    if isinstance(holder, list) and isinstance(step, int) and step < len(holder):
        return holder[step]
    return None
