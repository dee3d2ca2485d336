"""Checks JSON objects against a list of keys: present, of the right type, well formed, known. No dialect in here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal

from ranktable.codec.typed import TYPED_KINDS, TypedKind, check_typed, fits_typed
from ranktable.placeholder import name_placeholder
from ranktable.problem import Problem, Severity, join_key, show_value

Kind = Literal["text", "number", "list"] | TypedKind

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,9}")
_is_decimal = _DECIMAL.fullmatch
_MAX_LISTED = 100
"""Most unknown keys of one object, and most wrong items of one array, that are listed one by one."""
_MAX_NEAR = 64
"""Longest key that may be a misspelt one."""


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """One key of an object in a dialect. "text" and "number" are strings, a number one of decimal digits.

    A key equals itself only, so that it hashes fast.
    """

    name: str
    kind: Kind = "text"
    missing: Severity | None = None
    """How bad it is to leave the key out; None when it is optional."""
    rule: str = "R5"
    """The rule that a malformed number breaks."""


def parse_number(value: object) -> int | None:
    """Return the number in a decimal string of at most ten digits, or in a JSON integer; None for all else."""
    if isinstance(value, str):
        return int(value) if _is_decimal(value) else None
    is_plain = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**10
    return value if is_plain and isinstance(value, int) else None


def check_shape(
    members: Mapping[str, object], path: str, keys: Iterable[Key], known_extras: Iterable[str]
) -> Iterator[Problem]:
    """Yield what is wrong with the object at `path`: rules R4, R5, R31 and those that `keys` name."""
    shape = _shape_of(tuple(keys), frozenset(known_extras))
    if shape.fits(members):
        return
    by_name = shape.by_name
    unknown_names = [name for name in members if name not in shape.kinds]
    misspelt = {
        name: _find_near(name, shape.kinds) if place < _MAX_LISTED else None for place, name in enumerate(unknown_names)
    }
    for key in by_name.values():
        if key.name in members:
            yield from _check_value(members[key.name], join_key(path, key.name), key)
        elif key.missing:
            written = next((name for name, meant in misspelt.items() if meant == key.name), None)
            yield _report_missing(path, key, written)
    unknown = [
        (name, meant)
        for name, meant in misspelt.items()
        if meant is None or meant in members or meant not in shape.required
    ]
    for name, meant in unknown[:_MAX_LISTED]:
        yield _report_unknown(path, name, meant)
    if len(unknown) > _MAX_LISTED:
        message = f"{len(unknown) - _MAX_LISTED} more keys of the object are not known and will be ignored"
        yield Problem(path, "R31", "warning", message, "check that this is a rank table")


@dataclass(frozen=True, slots=True)
class _Shape:
    """A list of keys made ready for many objects."""

    by_name: Mapping[str, Key]
    kinds: Mapping[str, Kind | None]
    """Kind of each known key; None for a key that may hold anything."""
    required: frozenset[str]

    def fits(self, members: Mapping[str, object]) -> bool:
        """Return whether nothing is wrong with an object: the usual case, told in a fraction of the time."""
        if not self.required <= members.keys():
            return False
        kinds = self.kinds
        for name, value in members.items():
            kind = kinds.get(name, "unknown")
            if kind == "text":
                if type(value) is not str:
                    return False
            elif kind == "number":
                if type(value) is not str or not _is_decimal(value):
                    return False
            elif kind == "list":
                if type(value) is not list or not value or any(type(item) is not dict for item in value):
                    return False
            elif kind is not None and not fits_typed(value, kind):
                return False
        return True


@lru_cache(maxsize=256)
def _shape_of(keys: tuple[Key, ...], known_extras: frozenset[str]) -> _Shape:
    by_name = {key.name: key for key in keys}
    kinds = {**dict.fromkeys(known_extras), **{key.name: key.kind for key in keys}}
    return _Shape(by_name, kinds, frozenset(key.name for key in keys if key.missing))


def _find_near(name: str, known: Iterable[str]) -> str | None:
    if len(name) > _MAX_NEAR:
        return None
    plain = {key.replace("_", ""): key for key in known}
    near = get_close_matches(name.replace("_", "").replace("-", "").lower(), plain, n=1, cutoff=0.8)
    return plain[near[0]] if near else None


def _report_missing(path: str, key: Key, written: str | None) -> Problem:
    remedy = f"rename {written!r} to {key.name!r}" if written else f"add {key.name!r}"
    severity: Severity = key.missing or "error"
    return Problem(join_key(path, key.name), "R5", severity, "the key is missing", remedy)


def _report_unknown(path: str, name: str, meant: str | None) -> Problem:
    remedy = f"did you mean {meant!r}?" if meant else "remove it, or keep it if another program reads it"
    return Problem(join_key(path, name), "R31", "warning", "the key is not known and will be ignored", remedy)


def _check_value(value: object, path: str, key: Key) -> Iterator[Problem]:
    if key.kind == "list":
        yield from _check_list(value, path)
    elif key.kind in TYPED_KINDS:
        yield from check_typed(value, path, key.kind, key.rule)
    elif not isinstance(value, str):
        yield _report_type(value, path)
    elif key.kind == "number" and not _DECIMAL.fullmatch(value):
        what = name_placeholder(value)
        message = f"the value is {what}, not a number" if what else "the value is not a plain decimal number"
        remedy = 'write a decimal number as a string, such as "0"'
        yield Problem(path, key.rule, "error", message, remedy, show_value(value), is_form=True)


def _report_type(value: object, path: str) -> Problem:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    remedy = f'put it in double quotes: "{show_value(value)}"' if is_number else "write a string, or leave the key out"
    return Problem(path, "R4", "error", "the value must be a JSON string", remedy, show_value(value), is_form=True)


def _check_list(value: object, path: str) -> Iterator[Problem]:
    if not isinstance(value, list):
        yield Problem(
            path, "R5", "error", "the value must be an array", "write it in square brackets", show_value(value)
        )
        return
    if not value:
        yield Problem(path, "R5", "error", "the array is empty", "list at least one entry", "[]")
    wrong = [index for index, item in enumerate(value) if not isinstance(item, dict)]
    for index in wrong[:_MAX_LISTED]:
        message, remedy = "the entry must be an object", "write it in braces"
        yield Problem(f"{path}[{index}]", "R5", "error", message, remedy, show_value(value[index]))
    if len(wrong) > _MAX_LISTED:
        message = f"{len(wrong) - _MAX_LISTED} more entries are no objects"
        yield Problem(path, "R5", "error", message, "write an array of objects")
