"""Holds JSON objects against their schema: keys present, of the right type, well formed, known. No dialect in here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Literal

from ranktable.codec.schema import MAX_INTEGER, Field, Kind, Members, Schema, fits_kind, walk_objects
from ranktable.placeholder import name_placeholder
from ranktable.problem import Problem, Severity, join_index, join_key, show_value

_DIGITS = re.compile(r"[0-9]{1,10}")
_MAX_LISTED = 100
"""Most unknown keys of one object, and most wrong items of one array, that are listed one by one."""
_MAX_NEAR = 64
"""Longest key that may be a misspelt one."""


def check_tree(members: Members, schema: Schema, path: str = "") -> list[Problem]:
    """Return what is wrong with an object and all objects below it: R4, R5, R31 and the rules that its fields name."""
    problems = [] if fits(members, schema) else list(_check_object(members, schema, path))
    for field in schema.holders:
        if field.kind == "unread":
            continue
        inner = schema.within(field.name, members)
        child = members.get(field.name)
        if isinstance(child, dict) and field.kind == "object":
            problems += check_tree(child, inner, join_key(path, field.name))
        for child_path, child in walk_objects(members, path, field.name):
            if inner.holders or not fits(child, inner):
                problems += check_tree(child, inner, child_path)
    return problems


def fits(members: Members, schema: Schema) -> bool:
    """Return whether nothing is wrong with an object by itself: the usual case, told in a fraction of the time."""
    if not schema.required <= members.keys():
        return False
    kinds = schema.kinds
    for name, value in members.items():
        kind: Kind | Literal["unknown"] | None = kinds.get(name, "unknown")
        if not (type(value) is str if kind == "text" else fits_kind(value, kind)):
            return False
    return True


def check_version(value: Members, versions: tuple[str, ...], otherwise: str) -> Iterator[Problem]:
    """Rule R2: `version` is one of `versions`; `otherwise` says what another one means."""
    found, remedy = value.get("version"), f'write "version": "{versions[0]}"'
    if "version" not in value:
        yield Problem("version", "R2", "error", "the key is missing, so HCCL takes the table for an older kind", remedy)
    elif isinstance(found, str) and found not in versions:
        what = name_placeholder(found)
        message = f"the version is {what}" if what else otherwise
        yield Problem("version", "R2", "error", message, remedy, show_value(found))


def _check_object(members: Members, schema: Schema, path: str) -> Iterator[Problem]:
    unknown_names = [name for name in members if name not in schema.kinds]
    misspelt = {
        name: _find_near(name, schema.kinds) if place < _MAX_LISTED else None
        for place, name in enumerate(unknown_names)
    }
    for field in schema.fields:
        if field.name in members:
            yield from _check_value(members[field.name], join_key(path, field.name), field)
        elif field.missing:
            written = next((name for name, meant in misspelt.items() if meant == field.name), None)
            yield _report_missing(path, field, written)
    unknown = [
        (name, meant)
        for name, meant in misspelt.items()
        if meant is None or meant in members or meant not in schema.required
    ]
    for name, meant in unknown[:_MAX_LISTED]:
        yield _report_unknown(path, name, meant)
    if len(unknown) > _MAX_LISTED:
        message = f"{len(unknown) - _MAX_LISTED} more keys of the object are not known and will be ignored"
        yield Problem(path, "R31", "warning", message, "check that this is a rank table")


def _find_near(name: str, known: Iterable[str]) -> str | None:
    if len(name) > _MAX_NEAR:
        return None
    plain = {key.replace("_", ""): key for key in known}
    near = get_close_matches(name.replace("_", "").replace("-", "").lower(), plain, n=1, cutoff=0.8)
    return plain[near[0]] if near else None


def _report_missing(path: str, field: Field, written: str | None) -> Problem:
    remedy = f"rename {written!r} to {field.name!r}" if written else f"add {field.name!r}"
    severity: Severity = field.missing or "error"
    return Problem(join_key(path, field.name), "R5", severity, "the key is missing", remedy)


def _report_unknown(path: str, name: str, meant: str | None) -> Problem:
    remedy = f"did you mean {meant!r}?" if meant else "remove it, or keep it if another program reads it"
    return Problem(join_key(path, name), "R31", "warning", "the key is not known and will be ignored", remedy)


def _check_value(value: object, path: str, field: Field) -> Iterator[Problem]:
    kind = field.kind
    if fits_kind(value, kind):
        return
    if kind == "unread":
        remedy = 'write "version": "1.2" for a super pod, or remove the key'
        yield Problem(path, "R31", "warning", "the key is read in version 1.2 only", remedy)
    elif kind == "misplaced":
        yield Problem(path, "R31", "error", "the key belongs to the instance, not to a device", "move it up")
    elif kind in ("list", "any_list"):
        yield from _check_list(value, path)
    elif kind == "integer":
        yield _report_integer(value, path, field.rule)
    elif kind == "object":
        yield _report_kind(value, path, "an object", "write it in braces, or leave the key out")
    elif kind in ("texts", "entries"):
        yield from _check_items(value, path, kind)
    elif not isinstance(value, str):
        yield _report_type(value, path)
    else:
        yield _report_number(value, path, field)


def _report_type(value: object, path: str) -> Problem:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    remedy = f'put it in double quotes: "{show_value(value)}"' if is_number else "write a string, or leave the key out"
    return _report_kind(value, path, "a JSON string", remedy)


def _report_number(text: str, path: str, field: Field) -> Problem:
    what = name_placeholder(text)
    if field.kind == "device_number":
        otherwise = "the value is not a plain decimal number or -1"
        remedy = 'write the number of the device, or "-1" for a rank on the host'
    else:
        otherwise = "the value is not a plain decimal number"
        remedy = 'write a decimal number as a string, such as "0"'
    message = f"the value is {what}, not a number" if what else otherwise
    return Problem(path, field.rule, "error", message, remedy, show_value(text), is_form=True)


def _report_integer(value: object, path: str, rule: str) -> Problem:
    if isinstance(value, str):
        is_number = _DIGITS.fullmatch(value) is not None
        remedy = f"write it without quotes: {int(value)}" if is_number else "write a number without quotes"
        return _report_kind(value, path, "a JSON integer", remedy)
    if isinstance(value, int) and not isinstance(value, bool):
        message = f"the number must be from 0 to {MAX_INTEGER}"
        return Problem(path, rule, "error", message, "write a number in that range", show_value(value))
    return _report_kind(value, path, "a JSON integer", "write a whole number without quotes")


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
        yield Problem(join_index(path, index), "R5", "error", message, remedy, show_value(value[index]))
    if len(wrong) > _MAX_LISTED:
        message = f"{len(wrong) - _MAX_LISTED} more entries are no objects"
        yield Problem(path, "R5", "error", message, "write an array of objects")


def _check_items(value: object, path: str, kind: str) -> Iterator[Problem]:
    if not isinstance(value, list):
        yield _report_kind(value, path, "an array", "write it in square brackets")
        return
    wanted, name = (str, "a string") if kind == "texts" else (dict, "an object")
    wrong = ((index, item) for index, item in enumerate(value) if not isinstance(item, wanted))
    for index, item in islice(wrong, _MAX_LISTED):
        yield _report_kind(item, join_index(path, index), name, f"write {name}")
    rest = sum(1 for _ in wrong)
    if rest:
        message = f"{rest} more items of the array are not {name}"
        yield Problem(path, "R4", "error", message, "check that this is a rank table")


def _report_kind(value: object, path: str, name: str, remedy: str) -> Problem:
    # What is to be an object or an array cannot be a number or a text in another form.
    is_form = name in ("a JSON string", "a JSON integer", "a string")
    return Problem(path, "R4", "error", f"the value must be {name}", remedy, show_value(value), is_form=is_form)
