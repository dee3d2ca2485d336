"""What an object of a rank table is made of: one `Schema` per kind of object, and nothing about a key anywhere else.

A schema drives the check of the structure (`ranktable.codec.structure`), decoding and encoding, the search for misspelt
keys, and the counts that `ranktable fix` sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ranktable.problem import Severity, join_index, join_key

Kind = Literal[
    "text",
    "number",
    "device_number",
    "list",
    "any_list",
    "integer",
    "texts",
    "entries",
    "object",
    "unread",
    "misplaced",
]
"""How a value is written.

`text`, `number` and `device_number` are strings; a number has decimal digits, a device number may be "-1" too.
`list` is an array of objects that is not empty, `any_list` and `entries` may be empty. `integer` is a JSON integer of
32 bits from 0 on, `texts` an array of strings. `unread` may hold anything and is read in another version only;
`misplaced` belongs to the object above.
"""

Members = Mapping[str, object]

MAX_INTEGER = 2**32 - 1
_is_decimal = re.compile(r"0|[1-9][0-9]{0,9}").fullmatch
is_device_number = re.compile(r"-1|0|[1-9][0-9]{0,9}").fullmatch
"""Matches the number of a device, and -1 for a rank on the host."""


@dataclass(frozen=True, slots=True)
class Count:
    """What a key counts: the arrays that lead to it, and the noun for messages.

    The last step is an array whose entries are counted, or with `distinct` a key whose different texts are.
    """

    steps: tuple[str, ...]
    noun: str
    distinct: bool = False

    def of(self, members: Members) -> int | None:
        """Return how many `members` list; None where the array itself is missing."""
        *arrays, last = self.steps
        if not isinstance(members.get(self.steps[0]), list):
            return None
        holders = [members]
        for key in arrays:
            holders = [item for holder in holders for item in list_objects(holder, key)]
        values = [holder.get(last) for holder in holders]
        if self.distinct:
            return len({str(value) for value in values})
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
    of: Schema | Callable[[Members], Schema] | None = None
    """The objects in the value; a function where the object with the key decides it."""
    count: Count | None = None
    empty_is_none: bool = False
    """True when "" says that there is no value."""


@dataclass(frozen=True, eq=False)
class Schema:
    """The keys of one kind of object; `extras` are known by name only: other readers look at them."""

    fields: tuple[Field, ...]
    extras: frozenset[str] = frozenset()

    @cached_property
    def by_name(self) -> dict[str, Field]:
        """Every field by its key."""
        return {field.name: field for field in self.fields}

    @cached_property
    def by_role(self) -> dict[str, Field]:
        """The fields that have a role, by it, in the order in which they are written."""
        return {field.role: field for field in self.fields if field.role}

    @cached_property
    def holders(self) -> tuple[Field, ...]:
        """The fields whose values hold objects with a schema."""
        return tuple(field for field in self.fields if field.of is not None)

    @cached_property
    def kinds(self) -> dict[str, Kind | None]:
        """Kind of each known key; None for a key that may hold anything."""
        return {**dict.fromkeys(self.extras), **{field.name: field.kind for field in self.fields}}

    @cached_property
    def required(self) -> frozenset[str]:
        """The keys whose absence is reported."""
        return frozenset(field.name for field in self.fields if field.missing)

    @cached_property
    def _renamed(self) -> tuple[tuple[str, Field], ...]:
        return tuple((role, field) for role, field in self.by_role.items() if role != field.name or field.empty_is_none)

    def within(self, key: str, holder: Members | None = None) -> Schema:
        """Return the schema of the objects in `key`; `holder` is the object that has the key."""
        found = self.by_name[key].of
        assert found is not None, f"{key} holds no objects"
        return found if isinstance(found, Schema) else found(holder or {})

    def rename(self, members: Members, path: str) -> tuple[Members, dict[str, str] | None]:
        """Return the members under the names of their roles, and the paths of those that are called otherwise."""
        if not self._renamed:
            return members, None
        renamed, places = dict(members), {}
        for role, field in self._renamed:
            if role != field.name:
                places[role] = join_key(path, field.name)
            if field.name in members and not (field.empty_is_none and members[field.name] == ""):
                renamed[role] = renamed.pop(field.name)
            elif role == field.name:
                renamed.pop(role, None)
        return renamed, places or None


def parse_number(value: object) -> int | None:
    """Return the number in a decimal string of at most ten digits, or in a JSON integer; None for all else."""
    if isinstance(value, str):
        return int(value) if _is_decimal(value) else None
    is_plain = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**10
    return value if is_plain and isinstance(value, int) else None


def read_integer(value: object) -> int | None:
    """Return a JSON integer of 32 bits from 0 on, None for all else (also for true, 1.0 and "1")."""
    is_plain = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER
    return value if is_plain and isinstance(value, int) else None


def fits_kind(value: object, kind: Kind | Literal["unknown"] | None) -> bool:
    """Return whether nothing is wrong with a value of that kind; False for an unknown key."""
    if kind == "text":
        return type(value) is str
    if kind == "number":
        return type(value) is str and _is_decimal(value) is not None
    if kind == "integer":
        return read_integer(value) is not None
    if kind in ("list", "any_list"):
        return type(value) is list and (bool(value) or kind == "any_list") and all(type(v) is dict for v in value)
    if kind in ("texts", "entries"):
        wanted = str if kind == "texts" else dict
        return isinstance(value, list) and all(isinstance(item, wanted) for item in value)
    if kind == "device_number":
        return type(value) is str and is_device_number(value) is not None
    return isinstance(value, dict) if kind == "object" else kind is None


def walk_objects(holder: Members, path: str, key: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield path and members of each object in the array `holder[key]`; what is no object is skipped."""
    items = holder.get(key)
    if not isinstance(items, list):
        return
    base = join_key(path, key)
    for index, item in enumerate(items):
        if isinstance(item, dict):
            yield join_index(base, index), item


def list_objects(holder: Members, key: str) -> list[dict[str, object]]:
    """Return the objects in the array `holder[key]`; what is no object is left out."""
    items = holder.get(key)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def without(members: Members, *keys: str) -> dict[str, object]:
    """Return a copy of the members that lacks `keys`."""
    return {name: value for name, value in members.items() if name not in keys}
