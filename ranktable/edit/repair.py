"""Repairs of a JSON value by its paths.

Keys that stand twice in one object are dropped when both say the same, and refused when they differ (rule R32). Ranks
are put into the order that HCCL and MindSpore expect: string order of server_id, then device_id (rules R9 to R12).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ranktable.errors import InvalidTableError
from ranktable.problem import Position, join_index, join_key, show_value
from ranktable.reading.document import Document
from ranktable.tables import describe_repeat
from ranktable.values import parse_number

_STEP = re.compile(r'\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]')

Holder = dict[str, object] | list[object]
Members = dict[str, object]


@dataclass(frozen=True, slots=True)
class Repair:
    """A fault that was put right: the rule it broke, where, and what stood there before and stands there now."""

    rule: str
    path: str
    """JSON path; empty for a repair of the text, which has a position, or of the file as a whole."""
    change: str
    """What was done, such as `0 -> "0"`."""
    position: Position | None = None

    def __str__(self) -> str:
        place = self.path or (f"line {self.position.line}" if self.position else "the file")
        return f"{self.rule} {place}: {self.change}"


def replaced(before: object, after: object) -> str:
    """Return `before -> after` in JSON."""
    return f"{show_value(before)} -> {show_value(after)}"


def find_holder(value: Holder, path: str) -> tuple[Holder, str | int] | None:
    """Return the object or array that holds what is at `path`, with its key or index there; None when it is absent."""
    steps = [_read_step(match) for match in _STEP.finditer(path)]
    if not steps:
        return None
    holder: object = value
    for step in steps[:-1]:
        holder = _child(holder, step)
    last = steps[-1]
    if isinstance(holder, dict) and isinstance(last, str) and last in holder:
        return holder, last
    if isinstance(holder, list) and isinstance(last, int) and last < len(holder):
        return holder, last
    return None


def _read_step(match: re.Match[str]) -> str | int:
    plain, index, quoted = match.groups()
    if index is not None:
        return int(index)
    return plain if plain is not None else str(json.loads(quoted))


def _child(holder: object, step: str | int) -> object:
    if isinstance(holder, dict) and isinstance(step, str):
        return holder.get(step)
    if isinstance(holder, list) and isinstance(step, int) and step < len(holder):
        return holder[step]
    return None


class _Members(dict[str, object]):
    """An object that remembers which of its keys stood there with different values."""

    __slots__ = ("differing",)
    differing: frozenset[str]


def drop_repeats(document: Document) -> list[Repair]:
    """Return a repair for each repeated key; the value of `document` has each key once already.

    Raises InvalidTableError with every key whose values differ: which one is meant cannot be known.
    """
    if not document.repeated_keys:
        return []
    differing = list(_find_differing(json.loads(document.text, object_pairs_hook=_build), ""))
    if differing:
        raise InvalidTableError(document.source, [describe_repeat(path) for path in differing])
    return [
        Repair("R32", repeat.path, "stood twice with the same value, is there once", repeat.position)
        for repeat in document.repeated_keys
    ]


def _build(pairs: list[tuple[str, object]]) -> _Members:
    built = _Members(pairs)
    built.differing = frozenset(
        key for key, value in pairs if len(built) < len(pairs) and not _is_same(built[key], value)
    )
    return built


def _is_same(one: object, other: object) -> bool:
    """Compare as JSON does: 1, 1.0 and true are three values."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _find_differing(value: object, path: str) -> Iterator[str]:
    if isinstance(value, _Members):
        yield from (join_key(path, key) for key in value if key in value.differing)
        for key, member in value.items():
            yield from _find_differing(member, join_key(path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_differing(item, join_index(path, index))


def reorder_ranks(value: Members, notes: list[str]) -> Iterator[Repair]:
    """Sort the servers by id as strings and their devices by number, and number the ranks in that order.

    Only for tables of `server_list` with one rank space, and only when every id can be read and is there once;
    otherwise nothing is changed, and `notes` gets the reason.
    """
    servers = value.get("server_list")
    reason = _find_obstacle(servers)
    if reason or not isinstance(servers, list):
        notes.append(f"the ranks are not reordered: {reason}")
        return
    before = [id(item) for server in servers for item in [server, *server["device"]]]
    servers.sort(key=lambda server: str(server["server_id"]))
    for server in servers:
        server["device"].sort(key=lambda device: parse_number(device["device_id"]) or 0)
    if [id(item) for server in servers for item in [server, *server["device"]]] != before:
        yield Repair("R11", "server_list", "sorted by server_id as strings, devices by device_id")
    yield from _number(servers)


def _number(servers: list[Members]) -> Iterator[Repair]:
    rank = 0
    for server_index, server in enumerate(servers):
        devices = server["device"]
        path = join_key(join_index("server_list", server_index), "device")
        for index, device in enumerate(devices if isinstance(devices, list) else ()):
            before = device.get("rank_id")
            if before != str(rank):
                device["rank_id"] = str(rank)
                place = join_key(join_index(path, index), "rank_id")
                yield Repair("R9", place, f"added {rank}" if before is None else replaced(before, str(rank)))
            rank += 1


def _find_obstacle(servers: object) -> str:
    """Return why the ranks cannot be numbered; empty when they can."""
    if not isinstance(servers, list) or not servers:
        return "only tables with a server_list can be"
    seen: set[str] = set()
    for index, server in enumerate(servers):
        server_id = server.get("server_id") if isinstance(server, dict) else None
        devices = server.get("device") if isinstance(server, dict) else None
        if not isinstance(server_id, str) or not isinstance(devices, list):
            return f"server_list[{index}] has no usable server_id or device"
        if server_id in seen:
            return f"the server_id of server_list[{index}] is there twice"
        seen.add(server_id)
        ids = [parse_number(device.get("device_id")) if isinstance(device, dict) else None for device in devices]
        if None in ids or len(set(ids)) < len(ids):
            return f"the device ids of server_list[{index}] are not readable and different"
    return ""
