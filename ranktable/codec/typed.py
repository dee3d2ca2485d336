"""Checks single JSON values of dialects whose values are not all strings: integers, objects, arrays of strings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from ranktable.problem import Problem, join_index, show_value

TypedKind = Literal["integer", "texts", "entries", "object"]
"""A JSON integer of 32 bits from 0 on; an array of strings; an array of objects that may be empty; an object."""
TYPED_KINDS = frozenset({"integer", "texts", "entries", "object"})

MAX_INTEGER = 2**32 - 1
MAX_LISTED = 100
"""Most wrong items of one array that are listed one by one."""

_DECIMAL = re.compile(r"[0-9]{1,10}")


def check_typed(value: object, path: str, kind: str, rule: str) -> Iterator[Problem]:
    """Yield what is wrong with a value of one of the `TYPED_KINDS`; a number out of range breaks `rule`."""
    if kind == "integer":
        yield from _check_integer(value, path, rule)
    elif kind == "object":
        if not isinstance(value, dict):
            yield _wrong_type(value, path, "an object", "write it in braces, or leave the key out")
    elif not isinstance(value, list):
        yield _wrong_type(value, path, "an array", "write it in square brackets")
    else:
        yield from _check_items(value, path, kind)


def fits_typed(value: object, kind: str) -> bool:
    """Return whether nothing is wrong with a value of one of the `TYPED_KINDS`; False for any other kind."""
    if kind == "integer":
        return read_integer(value) is not None
    if kind == "object":
        return isinstance(value, dict)
    if kind not in TYPED_KINDS or not isinstance(value, list):
        return False
    wanted = str if kind == "texts" else dict
    return all(isinstance(item, wanted) for item in value)


def read_integer(value: object) -> int | None:
    """Return a JSON integer of 32 bits from 0 on, None for all else (also for true, 1.0 and "1")."""
    is_plain = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER
    return value if is_plain and isinstance(value, int) else None


def _check_integer(value: object, path: str, rule: str) -> Iterator[Problem]:
    if read_integer(value) is not None:
        return
    if isinstance(value, str):
        is_number = _DECIMAL.fullmatch(value) is not None
        remedy = f"write it without quotes: {int(value)}" if is_number else "write a number without quotes"
        yield _wrong_type(value, path, "a JSON integer", remedy)
    elif isinstance(value, int) and not isinstance(value, bool):
        message = f"the number must be from 0 to {MAX_INTEGER}"
        yield Problem(path, rule, "error", message, "write a number in that range", show_value(value))
    else:
        yield _wrong_type(value, path, "a JSON integer", "write a whole number without quotes")


def _check_items(items: list[object], path: str, kind: str) -> Iterator[Problem]:
    wanted, name = (str, "a string") if kind == "texts" else (dict, "an object")
    wrong = ((index, item) for index, item in enumerate(items) if not isinstance(item, wanted))
    for index, item in islice(wrong, MAX_LISTED):
        yield _wrong_type(item, join_index(path, index), name, f"write {name}")
    rest = sum(1 for _ in wrong)
    if rest:
        message = f"{rest} more items of the array are not {name}"
        yield Problem(path, "R4", "error", message, "check that this is a rank table")


def _wrong_type(value: object, path: str, name: str, remedy: str) -> Problem:
    return Problem(path, "R4", "error", f"the value must be {name}", remedy, show_value(value), is_form=True)
