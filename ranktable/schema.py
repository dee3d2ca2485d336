"""What an object of a rank table is made of, one `Schema` per kind of object, and what is wrong with a given one.

It drives the check of the structure, limits, decoding, the search for misspelt keys, and the counts that `--fix` sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ranktable.problem import Problem, Severity, join_key, show_value
from ranktable.values import MAX_INTEGER, is_decimal, name_placeholder, parse_number

Kind = Literal["text", "number", "list", "any_list", "integer", "texts", "entries", "object", "unread"]
"""How a value is written.

`text` and `number` are strings; a number has decimal digits.
`list` is an array of objects that is not empty, `any_list` and `entries` may be empty. `integer` is a JSON integer of
32 bits from 0 on, `texts` an array of strings. `unread` may hold anything and is read in another version only.
"""
Members = Mapping[str, object]
_DIGITS = r"[0-9]{1,10}"
_MAX_LISTED = 100
"""Most unknown keys of one object, and most wrong items of one array, that are listed one by one."""
_MAX_NEAR = 64
"""Longest key that may be a misspelt one."""


class Count(NamedTuple):
    """What a key counts: the entries of the array that the steps lead to, and the noun for messages."""

    steps: tuple[str, ...]
    noun: str

    def of(self, members: Members) -> int | None:
        """Return how many `members` list; None where the array itself is missing."""
        *arrays, last = self.steps
        if not isinstance(members.get(self.steps[0]), list):
            return None
        holders = [members]
        for key in arrays:
            holders = [item for holder in holders for item in list_objects(holder, key)]
        values = [holder.get(last) for holder in holders]
        return sum(len(value) for value in values if isinstance(value, list))


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """One key of an object."""

    name: str
    kind: Kind = "text"
    missing: Severity | None = None
    """How bad it is to leave the key out; None when it is optional."""
    rule: str = "R5"
    """The rule that a malformed number or a wrong count breaks."""
    role: str | None = None
    """What the value is in the neutral table and to the rules: "server_id", "device_ip", "rank_id", ..."""
    of: Schema | None = None
    count: Count | None = None
    limits: tuple[int, int] | None = None
    """Lowest and highest number, bytes of a text, or entries of an array."""
    choices: tuple[str, ...] = ()


class Schema:
    """The keys of one kind of object; `extras` are known by name only: other readers look at them."""

    def __init__(self, *fields: Field, extras: frozenset[str] = frozenset()) -> None:
        self.fields = fields
        self.by_name = {field.name: field for field in fields}
        self.by_role = {field.role: field for field in fields if field.role}
        self.holders = tuple(field for field in fields if field.of is not None)
        """The fields whose values hold objects with a schema."""
        self.kinds: dict[str, Kind | None] = {**dict.fromkeys(extras), **{field.name: field.kind for field in fields}}
        """Kind of each known key; None for a key that may hold anything."""
        self.required = frozenset(field.name for field in fields if field.missing)
        """The keys whose absence is reported."""

    def within(self, key: str) -> Schema:
        """Return the schema of the objects in `key`."""
        found = self.by_name[key].of
        assert found is not None, f"{key} holds no objects"
        return found


def fits_kind(value: object, kind: Kind | Literal["unknown"] | None) -> bool:
    """Return whether nothing is wrong with a value of that kind; False for an unknown key."""
    if kind == "text":
        return type(value) is str
    if kind == "number":
        return type(value) is str and is_decimal(value) is not None
    if kind == "integer":
        return type(value) is int and 0 <= value <= MAX_INTEGER
    if kind in ("list", "any_list"):
        return type(value) is list and (bool(value) or kind == "any_list") and all(type(v) is dict for v in value)
    if kind in ("texts", "entries"):
        wanted = str if kind == "texts" else dict
        return isinstance(value, list) and all(isinstance(item, wanted) for item in value)
    return isinstance(value, dict) if kind == "object" else kind is None


def walk_objects(holder: Members, path: str, key: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield path and members of each object in the array `holder[key]`; what is no object is skipped."""
    items = holder.get(key)
    if not isinstance(items, list):
        return
    base = join_key(path, key)
    for index, item in enumerate(items):
        if isinstance(item, dict):
            yield f"{base}[{index}]", item


def walk_tree(
    members: dict[str, object], schema: Schema, path: str = "", *, enters_unread: bool = True
) -> Iterator[tuple[dict[str, object], Schema, str]]:
    """Yield an object and all objects below it that the schema knows, each before those in it, with schema and path."""
    yield members, schema, path
    for field in schema.holders:
        if field.of is None or (field.kind == "unread" and not enters_unread):
            continue
        child = members.get(field.name)
        if isinstance(child, dict) and field.kind == "object":
            yield from walk_tree(child, field.of, join_key(path, field.name), enters_unread=enters_unread)
        for place, item in walk_objects(members, path, field.name):
            if field.of.holders:
                yield from walk_tree(item, field.of, place, enters_unread=enters_unread)
            else:
                yield item, field.of, place


def list_objects(holder: Members, key: str) -> list[dict[str, object]]:
    """Return the objects in the array `holder[key]`; what is no object is left out."""
    return [item for _, item in walk_objects(holder, "", key)]


def check_tree(members: Members, schema: Schema) -> list[Problem]:
    """Return what is wrong with an object and all objects below it: R4, R5, R31 and the rules that its fields name."""
    problems: list[Problem] = []
    for found, its_schema, path in walk_tree(dict(members), schema, enters_unread=False):
        if not _fits(found, its_schema):
            problems += _check_object(found, its_schema, path)
    return problems


def check_limits(members: Members, schema: Schema, rule: str) -> Iterator[Problem]:
    """Yield what is outside the limits and choices of its field, in an object and all objects below it."""
    for found, its_schema, path in walk_tree(dict(members), schema):
        for field in its_schema.fields:
            value = found.get(field.name)
            fault = _beyond(value, field) if field.name in found and fits_kind(value, field.kind) else None
            if fault is not None:
                shown = None if isinstance(value, list) else show_value(value)
                yield Problem(join_key(path, field.name), rule, "error", *fault, shown)


def _beyond(value: object, field: Field) -> tuple[str, str] | None:
    """Return message and remedy of a value outside its limits."""
    if field.choices and value not in field.choices:
        return "HCCL does not know the value", f"write {' or '.join(show_value(known) for known in field.choices)}"
    if field.limits is None:
        return None
    lowest, highest = field.limits
    number = parse_number(value)
    if isinstance(value, list):
        message = f"it has {len(value)} entries, HCCL reads {lowest} to {highest}"
        return None if lowest <= len(value) <= highest else (message, "list as many as it reads")
    if field.kind == "text":
        size = len(str(value).encode("utf-8", "surrogatepass"))
        message = f"the text must have {lowest} to {highest} bytes"
        return None if lowest <= size <= highest else (message, "write a shorter or a filled text")
    if number is None or lowest <= number <= highest:
        return None
    return f"the number must be from {lowest} to {highest}", "write a number in that range"


def _fits(members: Members, schema: Schema) -> bool:
    """Return whether nothing is wrong with an object by itself: the usual case, told in a fraction of the time."""
    if not schema.required <= members.keys():
        return False
    kinds = schema.kinds
    for name, value in members.items():
        kind: Kind | Literal["unknown"] | None = kinds.get(name, "unknown")
        if not (type(value) is str if kind == "text" else fits_kind(value, kind)):
            return False
    return True


def check_version(value: Members, versions: tuple[str, ...]) -> Iterator[Problem]:
    """Rule R2: `version` is one of `versions`, or absent without any."""
    found = value.get("version")
    if not versions:
        if "version" in value:
            message = "this kind of table has no version; HCCL would look for server_list in it"
            yield Problem("version", "R2", "error", message, "remove the key", show_value(found))
        return
    remedy = f'write "version": "{versions[0]}"'
    if "version" not in value:
        yield Problem("version", "R2", "error", "the key is missing, so HCCL takes the table for an older kind", remedy)
    elif isinstance(found, str) and found not in versions:
        what = name_placeholder(found) or "not known for a table with these keys"
        yield Problem("version", "R2", "error", f"the version is {what}", remedy, show_value(found))


def _check_object(members: Members, schema: Schema, path: str) -> Iterator[Problem]:
    unknown_names = [name for name in members if name not in schema.kinds]
    misspelt = {
        name: find_near(name, schema.kinds) if place < _MAX_LISTED else None for place, name in enumerate(unknown_names)
    }
    for field in schema.fields:
        where = join_key(path, field.name)
        if field.name in members:
            yield from _check_value(members[field.name], where, field)
        elif field.missing:
            written = next((name for name, meant in misspelt.items() if meant == field.name), None)
            remedy = f"rename {written!r} to {field.name!r}" if written else f"add {field.name!r}"
            yield Problem(where, "R5", field.missing, "the key is missing", remedy)
    unknown = [
        (name, meant)
        for name, meant in misspelt.items()
        if meant is None or meant in members or meant not in schema.required
    ]
    for name, meant in unknown[:_MAX_LISTED]:
        remedy = f"did you mean {meant!r}?" if meant else "remove it, or keep it if another program reads it"
        yield Problem(join_key(path, name), "R31", "warning", "the key is not known and will be ignored", remedy)
    if len(unknown) > _MAX_LISTED:
        message = f"{len(unknown) - _MAX_LISTED} more keys of the object are not known and will be ignored"
        yield Problem(path, "R31", "warning", message, "check that this is a rank table")


def find_near(name: str, known: Iterable[str], cutoff: float = 0.8) -> str | None:
    """Return which of the known keys a strange one is meant to be, by its letters; None without one."""
    from difflib import get_close_matches  # not where all is well

    if len(name) > _MAX_NEAR:
        return None
    plain = {key.replace("_", ""): key for key in known}
    near = get_close_matches(name.replace("_", "").replace("-", "").lower(), plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


_ARRAYS = {
    "list": ("R5", dict, "an object", "write it in braces"),
    "any_list": ("R5", dict, "an object", "write it in braces"),
    "entries": ("R4", dict, "an object", "write it in braces"),
    "texts": ("R4", str, "a string", "write a string"),
}
"""For each kind of array: the rule that a wrong one breaks, and the type of its items, with name and remedy."""


def _check_value(value: object, path: str, field: Field) -> Iterator[Problem]:
    kind = field.kind
    if fits_kind(value, kind):
        return
    if kind == "unread":
        remedy = 'write "version": "1.2" for a super pod, or remove the key'
        yield Problem(path, "R31", "warning", "the key is read in version 1.2 only", remedy)
    elif kind in _ARRAYS:
        yield from _check_array(value, path, kind)
    elif kind == "object":
        yield _wrong_type(value, path, "an object", "write it in braces, or leave the key out")
    elif kind == "integer" and isinstance(value, int) and not isinstance(value, bool):
        message = f"the number must be from 0 to {MAX_INTEGER}"
        yield Problem(path, field.rule, "error", message, "write a number in that range", show_value(value))
    elif kind == "integer":
        is_number = isinstance(value, str) and re.fullmatch(_DIGITS, value) is not None
        remedy = f"write it without quotes: {int(str(value))}" if is_number else "write a number without quotes"
        yield _wrong_type(value, path, "a JSON integer", remedy)
    elif not isinstance(value, str):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        remedy = f'put it in double quotes: "{show_value(value)}"' if is_number else "write a string"
        yield _wrong_type(value, path, "a JSON string", remedy)
    else:
        what = name_placeholder(value)
        message = f"the value is {what}, not a number" if what else "the value is not a plain decimal number"
        remedy = 'write a decimal number as a string, such as "0"'
        yield Problem(path, field.rule, "error", message, remedy, show_value(value))


def _check_array(value: object, path: str, kind: str) -> Iterator[Problem]:
    rule, wanted, name, remedy = _ARRAYS[kind]
    if not isinstance(value, list):
        yield _wrong_type(value, path, "an array", "write it in square brackets", rule)
        return
    if not value:
        yield Problem(path, rule, "error", "the array is empty", "list at least one entry", "[]")
    wrong = [index for index, item in enumerate(value) if not isinstance(item, wanted)]
    for index in wrong[:_MAX_LISTED]:
        yield _wrong_type(value[index], f"{path}[{index}]", name, remedy, rule)
    if len(wrong) > _MAX_LISTED:
        message = f"{len(wrong) - _MAX_LISTED} more items of the array are not {name}"
        yield Problem(path, rule, "error", message, "check that this is a rank table")


def _wrong_type(value: object, path: str, name: str, remedy: str, rule: str = "R4") -> Problem:
    return Problem(path, rule, "error", f"the value must be {name}", remedy, show_value(value))
