"""Repairs the mechanical faults of a table: those whose right form follows from what stands there.

Never made up: ids, addresses, versions. Never changed: the status, because only the producer of a table knows whether
it is complete; a value that stands twice with different contents, because only a person knows which one is right.

Keys: a key is taken for another when they differ in letter case, underscores, dashes or a plural s only (`deviceIp`,
`devices`), and also in a letter or two when the other is required and missing. Keys that are known for other readers
stay as they are. Counts (R6, R28, R30) are set to what is listed; right ones are computed when a table is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache

from ranktable.edit.repair import Repair, drop_repeats, find_holder, reorder_ranks, replaced
from ranktable.kinds import Codec, all_dialects, codec_names, codec_of, detect_dialect
from ranktable.problem import Problem, join_key, show_value
from ranktable.reading.document import Document
from ranktable.reading.lenient import TextRepair, parse_leniently
from ranktable.schema import Field, Schema, walk_tree
from ranktable.tables import detect_codec

_SEPARATORS = re.compile(r"[\s_-]+")
_CLOSE = 0.85
Members = dict[str, object]
_DECIMAL = re.compile(r"\s*\+?([0-9]{1,10})\s*")
_RULES = {"server_id": "R7", "device_id": "R8", "rank_id": "R9", "device_ip": "R13", "host_ip": "R15"}
"""The rule that a blank around a value breaks; R4 for all others."""
_IDENTITIES = frozenset({"server_id", "super_pod_id", "cluster_id", "group", "pod_name"})
_MAX_PASSES = 3


def schema_for(value: Mapping[str, object]) -> Schema:
    """Return the schema of the table, or one of the keys of all dialects where its own keys do not tell which it is."""
    detection = detect_dialect(value)
    codec = detection.dialect.codec if detection else None
    return codec.schema if codec else _any_schema()


@cache
def _any_schema() -> Schema:
    schemas = [codec_of(name).schema for name in codec_names()]
    telling = ((*kind.keys, *kind.short_keys) for kind in all_dialects())
    return Schema(_join(schemas), frozenset().union(*telling, *(schema.extras for schema in schemas)))


def _join(schemas: list[Schema]) -> tuple[Field, ...]:
    """Return the fields of several kinds of object; the objects below those of one name are joined too."""
    named: dict[str, list[Field]] = {}
    for schema in schemas:
        for field in schema.fields:
            named.setdefault(field.name, []).append(field)
    return tuple(replace(fields[0], of=_join_below(fields)) for fields in named.values())


def _join_below(fields: list[Field]) -> Schema | None:
    below = [field.of if isinstance(field.of, Schema) else field.of({}) for field in fields if field.of is not None]
    return Schema(_join(below), frozenset().union(*(schema.extras for schema in below))) if below else None


def find_misspelt(members: Mapping[str, object], schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield each strange key of an object with the known key that it is meant to be."""
    if members.keys() <= schema.kinds.keys():
        return
    taken = set(members)
    by_form = {_normalise(key): key for key, kind in schema.kinds.items() if kind != "misplaced"}
    wanted = {_normalise(f.name): f.name for f in schema.fields if f.missing == "error" and f.name not in members}
    for name in members:
        if name in schema.kinds:
            continue
        close = get_close_matches(_normalise(name), wanted, n=1, cutoff=_CLOSE)
        meant = by_form.get(_normalise(name)) or (wanted[close[0]] if close else None)
        if meant is not None and meant not in taken:
            taken.add(meant)
            yield name, meant


def _normalise(name: str) -> str:
    return _SEPARATORS.sub("", name).lower().rstrip("s")


def fix_counts(value: Members, schema: Schema) -> Iterator[Repair]:
    """Set each count to the number of entries that it counts; add one whose absence is worth a warning."""
    for members, its_schema, path in walk_tree(value, schema):
        for field in its_schema.counted:
            number = field.count.of(members) if field.count else None
            if number:
                yield from _set_count(members, field, number, path)


def _set_count(members: Members, field: Field, number: int, path: str) -> Iterator[Repair]:
    """Set a count that is wrong, in the type that the dialect has for it."""
    key = field.name
    before = members.get(key)
    if key not in members and field.missing == "warning" and field.count:
        kept = dict(members)
        members.clear()
        for name, member in kept.items():
            members |= {key: str(number), name: member} if name == field.count.steps[0] else {name: member}
        yield Repair("R5", join_key(path, key), f"added {show_value(str(number))}")
    elif isinstance(before, str | int) and not isinstance(before, bool):
        after = number if field.kind == "integer" else str(number)
        if after != before:
            members[key] = after
            yield Repair(field.rule, join_key(path, key), f"{replaced(before, after)}, as many as are listed")


@dataclass(frozen=True, slots=True)
class Fixed:
    """A table with its mechanical faults repaired: the JSON object, what was repaired, and what could not be."""

    value: dict[str, object]
    repairs: tuple[Repair, ...]
    notes: tuple[str, ...] = ()
    """Why something that was asked for was not done."""


def fix_table(data: bytes, source: str = "<bytes>", *, reorder: bool = False) -> Fixed:
    """Return the table in `data` with its mechanical faults repaired, in the order: text, keys, values, counts.

    `reorder` numbers the ranks anew in the string order of the server ids, and the device ids of each server (R9 to
    R12). Raises JsonTextError for text that cannot be repaired, InvalidTableError for keys that stand twice with
    different values, UnknownDialectError and UnsupportedDialectError.
    """
    document, text_repairs = parse_leniently(data, source)
    repairs = [_describe_text(repair) for repair in text_repairs]
    repairs += drop_repeats(document)
    value = document.value
    repairs += _fix_keys(value, schema_for(value))
    _, codec = detect_codec(Document(source, document.text, value))
    for _ in range(_MAX_PASSES):  # a repair may show that it is another kind of table
        spelling = [*_fix_keys(value, codec.schema), *_strip_blanks(value, codec.schema)]
        repairs += spelling
        if not spelling:
            break
        _, codec = detect_codec(Document(source, document.text, value))
    repairs += _fix_values(value, codec)
    repairs += fix_counts(value, codec.schema)
    notes: list[str] = []
    if reorder:
        repairs += reorder_ranks(value, notes)
    return Fixed(value, tuple(repairs), tuple(notes))


def _describe_text(repair: TextRepair) -> Repair:
    after = repair.after or "taken out"
    return Repair("R1", "", f"{repair.before} -> {after}", repair.position)


def _fix_keys(value: Members, schema: Schema) -> Iterator[Repair]:
    """Rename misspelt keys."""
    for members, its_schema, path in walk_tree(value, schema):
        misspelt = dict(find_misspelt(members, its_schema))
        if misspelt:
            renamed = {misspelt.get(name, name): member for name, member in members.items()}
            members.clear()
            members.update(renamed)
        for name, meant in misspelt.items():
            yield Repair("R31", join_key(path, name), f"renamed to {meant!r}")


def _strip_blanks(value: Members, schema: Schema) -> Iterator[Repair]:
    """Strip blanks from values, but for ids that would be those of another then."""
    kept = _find_ambiguous(value, schema)
    for members, its_schema, path in walk_tree(value, schema):
        for key in its_schema.kinds.keys() & members.keys():
            before = members[key]
            if isinstance(before, str) and key != "status" and _strip(before) != before and _strip(before) not in kept:
                members[key] = _strip(before)
                yield Repair(_RULES.get(key, "R4"), join_key(path, key), replaced(before, members[key]))


def _find_ambiguous(value: Members, schema: Schema) -> AbstractSet[str]:
    """Return the ids that differ from another one in blanks only: without them two servers would be one."""
    spelt: dict[tuple[str, str], set[str]] = {}
    for members, its_schema, _ in walk_tree(value, schema):
        for role in _IDENTITIES & its_schema.by_role.keys():
            text = members.get(its_schema.by_role[role].name)
            if isinstance(text, str):
                spelt.setdefault((role, _strip(text)), set()).add(text)
    return frozenset(text for (_, text), forms in spelt.items() if len(forms) > 1)


def _strip(value: str) -> str:
    """Strip blanks from a value and from the addresses of a list with commas."""
    return ",".join(part.strip() for part in value.split(",")) if value.strip() else value


def _fix_values(value: dict[str, object], codec: Codec) -> Iterator[Repair]:
    """Give values the type and form that the dialect wants, until nothing changes any more."""
    for _ in range(_MAX_PASSES):
        repairs = [repair for problem in codec.check_structure(value) for repair in _fix_value(value, problem)]
        yield from repairs
        if not repairs:
            return


def _fix_value(value: dict[str, object], problem: Problem) -> Iterator[Repair]:
    if not problem.is_form and problem.path != "version":  # an id that stands twice is for a person
        return
    found = find_holder(value, problem.path)
    if found is None:
        return
    holder, key = found
    before = holder[key]  # type: ignore[index]
    after = _retype(before, key) if problem.rule == "R4" else _plain_number(before)
    if after is not None and after != before:
        holder[key] = after  # type: ignore[index]
        yield Repair(problem.rule, problem.path, replaced(before, after))


def _retype(value: object, key: str | int) -> str | int | None:
    """Return a number as a string and a decimal string as a number: the dialect wants the other of the two."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int) or (isinstance(value, float) and key == "version"):
        return str(value)
    match = _DECIMAL.fullmatch(value) if isinstance(value, str) else None
    return int(match[1]) if match else None


def _plain_number(value: object) -> str | None:
    """Return a decimal string without leading zeros and blanks; None for all else."""
    match = _DECIMAL.fullmatch(value) if isinstance(value, str) else None
    return str(int(match[1])) if match else None
