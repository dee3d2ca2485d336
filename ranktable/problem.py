"""One finding of a validation, and the JSON paths that findings point at."""

from __future__ import annotations

import json
import re
from typing import Literal

from ranktable.record import Record

Severity = Literal["error", "warning"]

_PLAIN_KEY = r"[A-Za-z_][A-Za-z0-9_-]*"
_LAST_STEP = r'(?:\.?[A-Za-z_][A-Za-z0-9_-]*|\[\d+\]|\["(?:[^"\\]|\\.)*"\])\Z'
_MAX_SHOWN = 60
_MAX_PATH = 240


class Position(Record):
    """A place in a text, counted from 1; the column counts characters."""

    line: int
    column: int


class Problem(Record):
    """One finding: where, against which rule, how bad, what is wrong, and one way to put it right."""

    path: str
    """JSON path such as `server_list[1].device[3].device_ip`; empty for the file as a whole."""
    rule: str
    """Stable id, such as R7, L1 or P4."""
    severity: Severity
    message: str
    """What is wrong, without the value, so that repeats of one fault have equal messages."""
    remedy: str
    value: str | None = None
    """The offending value as JSON text, shortened; None where there is none, as for a missing key."""
    position: Position | None = None
    """Where the path stands in the file; None when the table did not come from a text."""

    @property
    def is_error(self) -> bool:
        """True for an error, False for a warning."""
        return self.severity == "error"

    @property
    def subject(self) -> str:
        """The path with the value: what the message speaks about. A path of odd, long keys is shortened."""
        path = self.path or "the file"
        if len(path) > _MAX_PATH:
            path = f"{path[:_MAX_PATH]}..."
        return path if self.value is None else f"{path} = {self.value}"


def show_value(value: object) -> str:
    """Return `value` as JSON text in ASCII, cut to 60 characters."""
    text = json.dumps(value[:_MAX_SHOWN] if isinstance(value, str) else value)
    if isinstance(value, str) and len(value) > _MAX_SHOWN:
        return text[: _MAX_SHOWN - 3] + "..."
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def join_key(path: str, key: str) -> str:
    """Return the path of member `key` of the object at `path`: `server_list[0].device`."""
    if not (key.isidentifier() and key.isascii()) and not re.fullmatch(_PLAIN_KEY, key):
        return f"{path}[{json.dumps(key)}]"
    return f"{path}.{key}" if path else key


def parent_path(path: str) -> str:
    """Return the path of the object or array that holds `path`; the top is the empty path."""
    return re.sub(_LAST_STEP, "", path, count=1)
