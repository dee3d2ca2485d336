"""Tables out of tables: each function takes tables and returns new ones, and says what it changed or left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ranktable.kinds import dialect_of
from ranktable.model import RankTable
from ranktable.schema import Schema, without
from ranktable.text import plain


@dataclass(frozen=True, slots=True)
class Edited:
    """A new table and the lines that its user must know, in the order of their weight."""

    table: RankTable
    notes: tuple[str, ...] = ()


def drop_counts(table: RankTable) -> tuple[RankTable, list[str]]:
    """Return the table without counts of its file, and a line for each that was wrong there."""
    codec = dialect_of(table.dialect).codec
    top = codec.schema if codec else Schema(())
    keys = [field.name for field in top.counted]
    notes = [_describe(key, table.extra[key], "") for key in table.extra if key in keys]
    below = [top.within(field.name) for field in top.holders]
    group_keys = [field.name for schema in below if "group" in schema.by_role for field in schema.counted]
    for group in table.groups:
        place = f" of group {plain(group.name)}"
        notes += [_describe(key, group.extra[key], place) for key in group.extra if key in group_keys]
    if not notes:
        return table, []
    groups = tuple(replace(group, extra=without(group.extra, *group_keys)) for group in table.groups)
    return replace(table, extra=without(table.extra, *keys), groups=groups), notes


def _describe(key: str, value: object, place: str) -> str:
    return f"{key} {plain(str(value))[:40]}{place} was wrong and is counted anew"
