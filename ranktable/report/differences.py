"""The differences of two tables as lines for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ranktable.compare import Change, Subject
from ranktable.report.words import count_noun, plain

_SHOWN_REPEATS = 3
_MAX_VALUE = 60
_SIGNS = {"removed": "-", "added": "+", "changed": "~"}
_PARTS = {"server": "device", "super_pod": "server", "cluster": "member"}


def render_changes(changes: Sequence[Change], first: str, second: str) -> str:
    """Return a line per change (- only in the first, + only in the second, ~ changed); repeats are counted."""
    if not changes:
        return f"{plain(first)} and {plain(second)} say the same\n"
    groups: dict[tuple[str, str, str], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.kind, change.subject.item, change.field), []).append(change)
    lines = [line for group in groups.values() for line in _render_group(group)]
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


def _render_group(group: Sequence[Change]) -> Iterable[str]:
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
