"""Walks the objects of a JSON value and takes its members apart. No dialect in here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ranktable.problem import Problem, join_index, join_key, show_value


def walk_objects(holder: Mapping[str, object], path: str, key: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield path and members of each object in the array `holder[key]`; what is no object is skipped."""
    items = holder.get(key)
    if not isinstance(items, list):
        return
    base = join_key(path, key)
    for index, item in enumerate(items):
        if isinstance(item, dict):
            yield join_index(base, index), item


def list_objects(holder: Mapping[str, object], key: str) -> list[dict[str, object]]:
    """Return the objects in the array `holder[key]`; what is no object is left out."""
    items = holder.get(key)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def pop_text(members: dict[str, object], key: str) -> str | None:
    """Remove the member and return it as text; None when it is missing or empty."""
    return str(members.pop(key, "")) or None


def without(members: Mapping[str, object], *keys: str) -> dict[str, object]:
    """Return a copy of the members that lacks `keys`."""
    return {name: value for name, value in members.items() if name not in keys}


def check_version(value: Mapping[str, object], version: str) -> Iterator[Problem]:
    """Rule R2: the member `version` is exactly `version`. That it is a string is checked with the other keys."""
    found, remedy = value.get("version"), f'write "version": "{version}"'
    if "version" not in value:
        yield Problem("version", "R2", "error", "the key is missing, so HCCL takes the table for an older kind", remedy)
    elif isinstance(found, str) and found != version:
        message = f"the keys are those of version {version}, and HCCL goes by this one"
        yield Problem("version", "R2", "error", message, remedy, show_value(found))
