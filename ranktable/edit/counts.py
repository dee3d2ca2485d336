"""The counts that a table says beside its lists (rules R6, R28, R30): set to what is listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ranktable.edit.repair import Repair, replaced
from ranktable.problem import join_index, join_key, show_value

Members = dict[str, object]


def fix_counts(value: Members) -> Iterator[Repair]:
    """Set each count of a table to the number of entries that it counts; add a missing `server_count`."""
    yield from _set_server_count(value, "", may_add=True)
    for path, group in _objects(value, "", "server_group_list"):
        yield from _set_server_count(group, path, may_add=False)
    yield from _set(value, "rank_count", _length(value, "rank_list"), "", "R30")
    yield from _set(value, "group_count", _length(value, "group_list"), "", "R28")
    for path, group in _objects(value, "", "group_list"):
        yield from _set(group, "instance_count", _length(group, "instance_list"), path, "R28")
        instances = [instance for _, instance in _objects(group, path, "instance_list")]
        counts = [_length(instance, "devices") or 0 for instance in instances]
        yield from _set(group, "device_count", sum(counts), path, "R28")
        yield from _set(group, "device_num", len(instances), path, "R28")
        yield from _set(group, "server_num", len({str(each.get("server_id")) for each in instances}), path, "R28")


def _set_server_count(members: Members, path: str, *, may_add: bool) -> Iterator[Repair]:
    number = _length(members, "server_list")
    if "server_count" in members:
        yield from _set(members, "server_count", number, path, "R6")
    elif may_add and number:
        _insert(members, "server_count", str(number), before="server_list")
        yield Repair("R5", join_key(path, "server_count"), f"added {show_value(str(number))}")


def _set(members: Members, key: str, number: int | None, path: str, rule: str) -> Iterator[Repair]:
    """Set a count that is there and wrong; its type stays, and so does the count of an empty or missing list."""
    before = members.get(key)
    if not number or not isinstance(before, str | int) or isinstance(before, bool):
        return
    after = number if isinstance(before, int) else str(number)
    if after != before:
        members[key] = after
        yield Repair(rule, join_key(path, key), f"{replaced(before, after)}, as many as are listed")


def _insert(members: Members, key: str, value: object, *, before: str) -> None:
    kept = dict(members)
    members.clear()
    for name, member in kept.items():
        if name == before:
            members[key] = value
        members[name] = member


def _length(members: Mapping[str, object], key: str) -> int | None:
    items = members.get(key)
    return len(items) if isinstance(items, list) else None


def _objects(members: Members, path: str, key: str) -> Iterator[tuple[str, Members]]:
    items = members.get(key)
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            yield join_index(join_key(path, key), index), item
