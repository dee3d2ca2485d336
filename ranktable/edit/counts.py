"""The counts that a table says beside its lists (rules R6, R28, R30): set to what is listed, or left to be computed.

The codecs keep wrong counts so that they are seen; right ones are computed when a table is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ranktable.codec.codec import codec_of
from ranktable.codec.schema import Field, Schema, walk_objects, without
from ranktable.edit.repair import Repair, replaced
from ranktable.model import RankTable
from ranktable.problem import join_key, show_value
from ranktable.report.words import plain

Members = dict[str, object]


def fix_counts(value: Members, schema: Schema, path: str = "") -> Iterator[Repair]:
    """Set each count to the number of entries that it counts; add one whose absence is worth a warning."""
    for field in schema.fields:
        number = field.count.of(value) if field.count else None
        if number:
            yield from _set(value, field, number, path)
    for field in schema.holders:
        inner = schema.within(field.name, value)
        if any(below.count or below.of for below in inner.fields):
            for child_path, child in walk_objects(value, path, field.name):
                yield from fix_counts(child, inner, child_path)


def drop_counts(table: RankTable) -> tuple[RankTable, list[str]]:
    """Return the table without counts of its file, and a line for each that was wrong there."""
    codec = codec_of(table.dialect)
    top = codec.schema if codec else Schema(())
    keys = _counts_in(top)
    notes = [_describe(key, table.extra[key], "") for key in table.extra if key in keys]
    group_keys = [key for field in top.holders if "group" in top.within(field.name).by_role
                  for key in _counts_in(top.within(field.name))]  # fmt: skip
    for group in table.groups:
        place = f" of group {plain(group.name)}"
        notes += [_describe(key, group.extra[key], place) for key in group.extra if key in group_keys]
    if not notes:
        return table, []
    groups = tuple(replace(group, extra=without(group.extra, *group_keys)) for group in table.groups)
    return replace(table, extra=without(table.extra, *keys), groups=groups), notes


def _counts_in(schema: Schema) -> list[str]:
    return [field.name for field in schema.fields if field.count]


def _describe(key: str, value: object, place: str) -> str:
    return f"{key} {plain(str(value))[:40]}{place} was wrong and is counted anew"


def _set(members: Members, field: Field, number: int, path: str) -> Iterator[Repair]:
    """Set a count that is wrong; its type stays."""
    key = field.name
    before = members.get(key)
    if key not in members and field.missing == "warning" and field.count:
        kept = dict(members)
        members.clear()
        for name, member in kept.items():
            members |= {key: str(number), name: member} if name == field.count.steps[0] else {name: member}
        yield Repair("R5", join_key(path, key), f"added {show_value(str(number))}")
    elif isinstance(before, str | int) and not isinstance(before, bool):
        after = number if isinstance(before, int) else str(number)
        if after != before:
            members[key] = after
            yield Repair(field.rule, join_key(path, key), f"{replaced(before, after)}, as many as are listed")
