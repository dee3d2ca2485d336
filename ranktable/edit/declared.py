"""Counts that a file has and that are wrong: the codecs keep them so that they are seen; an edit counts anew.

Source: the counts of template 2 (rule R28) and of version 2.0 (rule R30). Right ones are not in the model: they are
computed when the table is written. `server_count` is a field of the model and needs nothing of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ranktable.model import RankTable
from ranktable.report.words import plain

_TABLE_COUNTS = frozenset({"group_count", "rank_count"})
_GROUP_COUNTS = frozenset({"instance_count", "device_count", "device_num", "server_num"})


def drop_counts(table: RankTable) -> tuple[RankTable, list[str]]:
    """Return the table without counts of its file, and a line for each that was wrong there."""
    notes = [_describe(key, table.extra[key], "") for key in table.extra if key in _TABLE_COUNTS]
    for group in table.groups:
        place = f" of group {plain(group.name)}"
        notes += [_describe(key, group.extra[key], place) for key in group.extra if key in _GROUP_COUNTS]
    if not notes:
        return table, []
    groups = tuple(replace(group, extra=_without(group.extra, _GROUP_COUNTS)) for group in table.groups)
    return replace(table, extra=_without(table.extra, _TABLE_COUNTS), groups=groups), notes


def _without(extra: Mapping[str, object], keys: frozenset[str]) -> dict[str, object]:
    return {key: value for key, value in extra.items() if key not in keys}


def _describe(key: str, value: object, place: str) -> str:
    return f"{key} {plain(str(value))[:40]}{place} was wrong and is counted anew"
