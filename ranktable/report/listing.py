"""Lists for people and for programs: ranks of a table, differences of two, what files are, the register of rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ranktable.codec import FileKind
from ranktable.compare import Change, Subject
from ranktable.errors import RankTableError
from ranktable.model import RankTable
from ranktable.rules import Rule
from ranktable.text import count_noun, plain, render_json

_HEADER = ("rule", "severity", "chips", "profiles", "asks that")
_SHOWN_REPEATS = 3
_MAX_VALUE = 60
_SIGNS = {"removed": "-", "added": "+", "changed": "~"}
_PARTS = {"server": "device", "super_pod": "server", "cluster": "member"}


def render_table(table: RankTable) -> str:
    """Return the table as plain columns, one line per rank in ascending order."""
    placed = sorted(table.placements, key=lambda placement: placement[1].rank_id)
    rows = [("rank", "server_id", "device_id", "device_ip")]
    rows += [
        (str(device.rank_id), plain(server.server_id), str(device.device_id), plain(device.device_ip or "-"))
        for server, device in placed
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    size = f"{count_noun(len(table.servers), 'server')}, {count_noun(table.world_size, 'device')}"
    lines = [f"version {plain(table.dialect)}, status {plain(table.status)}, {size}"]
    lines += [f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}" for row in rows]
    return "\n".join(lines)


def render_kind(kind: FileKind | RankTableError) -> str:
    """Return the name of the kind after that of the file, and below it what is known of it."""
    if isinstance(kind, RankTableError):
        return f"ranktable: error: {kind}"
    here = "read, validated and converted" if kind.is_supported else "known by name only"
    facts = {
        "dialect": kind.dialect,
        "evidence": kind.evidence,
        "read by": kind.consumer,
        "here": here if kind.dialect else "",
        "advice": kind.advice,
    }
    lines = [f"    {name + ':':<10}{plain(text)}" for name, text in facts.items() if text]
    return "\n".join([f"{kind.source}: {kind.title}", *lines])


def kind_as_json(source: str, kind: FileKind | RankTableError) -> dict[str, object]:
    """Return the kind of the file `source`, or why it has none, as an object for JSON."""
    if isinstance(kind, RankTableError):
        return {"file": source, "error": kind.message, "remedy": kind.remedy}
    return {
        "file": kind.source,
        "dialect": kind.dialect,
        "title": kind.title,
        "evidence": kind.evidence,
        "consumer": kind.consumer,
        "supported": kind.is_supported,
        "advice": kind.advice,
    }


def render_rules(rules: Sequence[Rule]) -> str:
    """Return one line per rule, with the ids that findings carry."""
    rows = [_HEADER, *(_row(entry) for entry in rules)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    return "\n".join(lines) + "\n"


def _row(entry: Rule) -> tuple[str, str, str, str, str]:
    chips, readers = ",".join(entry.chips) or "all", ",".join(entry.readers) or "all"
    return entry.rule_id, entry.severity, chips, readers, entry.title


def rules_as_json(rules: Sequence[Rule]) -> str:
    """Return the rules as a JSON array; an empty list of chips or profiles stands for all of them."""
    return render_json(
        [
            {
                "rule": entry.rule_id,
                "severity": entry.severity,
                "chips": list(entry.chips),
                "profiles": list(entry.readers),
                "dialects": sorted(entry.dialects),
                "title": entry.title,
            }
            for entry in rules
        ]
    )


def render_changes(changes: Sequence[Change], first: str, second: str) -> str:
    """Return a line per change (- only in the first, + only in the second, ~ changed); repeats are counted."""
    if not changes:
        return f"{plain(first)} and {plain(second)} say the same\n"
    groups: dict[tuple[str, str, str], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.kind, change.subject.item, change.field), []).append(change)
    lines = [line for group in groups.values() for line in _render_alike(group)]
    total = count_noun(len(changes), "difference")
    return "\n".join([f"- {plain(first)}", f"+ {plain(second)}", *lines, total]) + "\n"


def changes_as_json(changes: Sequence[Change], first: str, second: str) -> dict[str, object]:
    """Return all changes as an object for JSON."""
    return {
        "first": first,
        "second": second,
        "same": not changes,
        "changes": [_change_as_json(change) for change in changes],
    }


def _render_alike(group: Sequence[Change]) -> Iterable[str]:
    yield from (f"{_SIGNS[change.kind]} {_render_change(change)}" for change in group[:_SHOWN_REPEATS])
    if len(group) > _SHOWN_REPEATS:
        yield f"    and {len(group) - _SHOWN_REPEATS} more like this"


def _render_change(change: Change) -> str:
    subject = _name(change.subject)
    if change.kind == "changed":
        values = f"{_shorten(change.before)} -> {_shorten(change.after)}"
        return f"{subject}{': ' if subject else ''}{plain(change.field)} {values}"
    details = [f"{plain(key)} {_shorten(value)}" for key, value in (change.fields or {}).items()]
    if change.subject.item in _PARTS:
        details.insert(0, count_noun(change.num_parts, _PARTS[change.subject.item]))
    return f"{subject}{': ' if details else ''}{', '.join(details)}"


def _name(subject: Subject) -> str:
    again = f" (no. {subject.copy + 1} of that name)" if subject.copy else ""
    name = f"{plain(subject.name)}{again}"
    part_again = f" (no. {subject.part_copy + 1} of that number)" if subject.part_copy else ""
    return {
        "table": "",
        "server": f"server {name}",
        "device": f"server {name} device {subject.part}{part_again}",
        "super_pod": f"super pod {name}",
        "super_pod_server": f"super pod {name} has server {plain(subject.part)}",
        "cluster": f"cluster {name}",
        "cluster_server": f"cluster {name} has server {plain(subject.part)}",
        "cluster_super_pod": f"cluster {name} has super pod {plain(subject.part)}",
        "group": f"group {name}",
    }[subject.item]


def _shorten(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= _MAX_VALUE else f"{value[: _MAX_VALUE - 3]}..."


def _change_as_json(change: Change) -> dict[str, object]:
    subject = change.subject
    place: dict[str, object] = {"item": subject.item, "name": subject.name, "part": subject.part}
    place |= {"copy": subject.copy, "part_copy": subject.part_copy}
    shown: dict[str, object] = {"change": change.kind, **place}
    if change.kind == "changed":
        return {**shown, "field": change.field, "before": _load(change.before), "after": _load(change.after)}
    fields = {key: json.loads(value) for key, value in (change.fields or {}).items()}
    return {**shown, "fields": fields, "parts": change.num_parts}


def _load(value: str | None) -> object:
    return None if value is None else json.loads(value)
