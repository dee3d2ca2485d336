"""Merges tables of one job's hosts into one.

What stands in the way is said in the words of the input: dialects, servers and ranks that stand twice, keys that
differ. Super pods, clusters and groups of equal names are joined. The result is held to every rule.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ranktable.errors import EditError, MergeError, NotReadyError
from ranktable.hosts.ranges import fold_numbers
from ranktable.kinds import dialect_of
from ranktable.model import COMPLETED, INITIALIZING, RankTable, Server
from ranktable.ordering import MergeOrder, RankKey, describe_order, number_devices, sort_holders, sort_servers
from ranktable.schema import Schema, without
from ranktable.text import count_noun, plain
from ranktable.validate import describe, validate_table

DATA_VERSION = "data_version"
"""Volcano's counter of changes; the highest of several is the newest, and no conflict."""
Source = tuple[str, RankTable]
"""The name of a file and the table in it."""
_SHOWN = 6
_RULES_OF_ORDER = frozenset({"R10", "R26"})
_MAX_FOLDED = 40


@dataclass(frozen=True, slots=True)
class Edited:
    """A new table and the lines that its user must know, in the order of their weight."""

    table: RankTable
    notes: tuple[str, ...] = ()


def merge_tables(
    tables: Iterable[RankTable],
    *,
    names: Sequence[str] | None = None,
    order: MergeOrder = "server_id",
    hosts: Sequence[str] | None = None,
    allow_initializing: bool = False,
    device_target: str = "ascend",
    chip: str | None = None,
) -> Edited:
    """Return one table of all servers of `tables`, which messages call by `names` (table 1, table 2, ...).

    `order` decides over the list of servers and the ranks, which become 0 to n-1: "server_id" sorts the ids as
    strings, "numeric" by value, "host_file" as `hosts` (server ids or host addresses) says; there the devices of a
    server keep the order of their ranks. "argument" keeps the order of the tables, and within each that of its ranks.

    Super pods, clusters and groups of equal names are joined. The status is "completed" when that of every table is.
    Raises MergeError with every conflict: of servers, device ids, addresses, ranks, keys, dialects, and what
    `validate_table` would call an error in the result for `device_target` and `chip` (a missing device_ip apart where
    no device has one: such tables are for CPU and GPU hosts). Raises NotReadyError for a table that is not completed
    unless `allow_initializing`, EditError for an order or a dialect that cannot be merged.
    """
    notes: list[str] = []
    sources = [(source, _drop_counts(source, table, notes)) for source, table in _name_tables(list(tables), names)]
    dialect = dialect_of(sources[0][1].dialect)
    for source, table in sources:
        if dialect_of(table.dialect).ranks_per_group:
            message = f"a table of dialect {table.dialect} cannot be merged: its ranks start again in each group"
            raise EditError(message, "edit the table of each group before they are put together")
        if not table.is_ready and not allow_initializing:
            raise NotReadyError(source)
    if dialect.ranks_by_position and order != "server_id":
        message = f"a table of dialect {dialect.name} cannot have the order {order!r}"
        raise EditError(message, "its readers count the ranks in the string order of the server ids")
    conflicts = list(_find_conflicts(sources))
    join_notes: list[str] = []
    joined = _join(sources, conflicts, join_notes)
    if conflicts:
        raise MergeError(conflicts)
    ordered = sort_servers(joined.servers, order, hosts)
    servers = number_devices(ordered, _rank_key(sources, ordered, order))
    merged = sort_holders(replace(joined, servers=servers))
    order_notes = [*describe_order(joined.servers, servers, order), *_describe_ranks(sources, servers)]
    warnings = _check_result(merged, sources, device_target, chip)
    return Edited(merged, (*order_notes, *warnings, *_describe_counts(sources), *join_notes, *notes))


def _name_tables(tables: Sequence[RankTable], names: Sequence[str] | None) -> list[Source]:
    if not tables:
        raise EditError("no table is given", "give at least one")
    chosen = names if names is not None else [f"table {number}" for number in range(1, len(tables) + 1)]
    if len(chosen) != len(tables):
        raise EditError(f"{len(tables)} tables have {len(chosen)} names", "give one name per table")
    empty = next((source for source, table in zip(chosen, tables, strict=True) if table.world_size == 0), None)
    if empty is not None:
        raise EditError(f"{empty} lists no device", "leave it out")
    return list(zip(chosen, tables, strict=True))


def _drop_counts(source: str, table: RankTable, notes: list[str]) -> RankTable:
    """Return the table without counts of its file, which decoding keeps when they are wrong; each gets a note."""
    codec = dialect_of(table.dialect).codec
    top = codec.schema if codec else Schema(())
    keys = {field.name for field in top.counted}
    below = [top.within(field.name) for field in top.holders]
    group_keys = {field.name for schema in below if "group" in schema.by_role for field in schema.counted}
    wrong = [(key, value, "") for key, value in table.extra.items() if key in keys]
    wrong += [
        (key, value, f" of group {plain(group.name)}")
        for group in table.groups
        for key, value in group.extra.items()
        if key in group_keys
    ]
    for key, value, place in wrong:
        notes.append(f"{source}: {key} {plain(str(value))[:40]}{place} was wrong and is counted anew")
    if not wrong:
        return table
    groups = tuple(replace(group, extra=without(group.extra, *group_keys)) for group in table.groups)
    return replace(table, extra=without(table.extra, *keys), groups=groups)


def _find_conflicts(sources: Sequence[Source]) -> Iterator[str]:
    """Yield a line for every dialect, server and rank that cannot be beside another.

    What else the rules of one table forbid is found in the merged one.
    """
    first_source, first = sources[0]
    source_of: dict[Hashable, str] = {}
    for source, table in sources:
        device_of: dict[int, str] = {}
        if table.dialect != first.dialect:
            kinds = f"its dialect is {plain(table.dialect)}, that of {first_source} is {plain(first.dialect)}"
            yield f"{source}: {kinds}; convert one of them first"
        for server in table.servers:
            key = server.group, server.server_id
            if key in source_of:
                yield f"{source}: server {plain(server.server_id)} stands in {source_of[key]} already; leave one out"
                continue
            source_of[key] = source
            for device in server.devices:
                name = f"device {device.device_id} of server {plain(server.server_id)}"
                if device.rank_id in device_of:
                    other = device_of[device.rank_id]
                    yield f"{source}: {name} has rank {device.rank_id}, as has {other} in {source}"
                device_of.setdefault(device.rank_id, name)


def _join(sources: Sequence[Source], conflicts: list[str], notes: list[str]) -> RankTable:
    """Return the merged table but for order and ranks; add to `conflicts` and `notes`."""
    pods = _join_named(sources, "super_pods", "super_pod_id", "super pod", conflicts, notes)
    clusters = _join_named(sources, "clusters", "cluster_id", "cluster", conflicts, notes)
    groups = _join_named(sources, "groups", "name", "group", conflicts, [])
    extra = _join_extras(sources, conflicts, notes)
    waiting = [source for source, table in sources if not table.is_ready]
    if waiting:
        notes.append(f'the status is "{INITIALIZING}": that of {waiting[0]} is not "{COMPLETED}"')
    servers = tuple(server for _, table in sources for server in table.servers)
    is_counted = any(table.declared_server_count is not None for _, table in sources)
    return RankTable(
        sources[0][1].dialect,
        servers,
        INITIALIZING if waiting else COMPLETED,
        len(servers) if is_counted else None,
        pods,
        clusters,
        groups,
        extra,
    )


def _join_named(
    sources: Sequence[Source], attribute: str, key: str, noun: str, conflicts: list[str], notes: list[str]
) -> tuple[Any, ...]:
    """Return the items of one kind in the order of their first appearance, each name once."""
    gathered: dict[str, list[tuple[str, Any]]] = {}
    for source, table in sources:
        for item in getattr(table, attribute):
            gathered.setdefault(getattr(item, key), []).append((source, item))
    for name, found in gathered.items():
        first_source, first = found[0]
        conflicts += [
            f"{source}: {noun} {plain(name)!r} has other keys than in {first_source}"
            for source, item in found[1:]
            if not _same_json(dict(first.extra), dict(item.extra))
        ]
        places = list(dict.fromkeys(source for source, _ in found))
        if len(found) > 1:
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            notes.append(f"{noun} {plain(name)} is joined out of {', '.join(places[:3])}{more}")
    return tuple(_add([item for _, item in found]) for found in gathered.values())


def _add(items: list[Any]) -> Any:
    """Return one super pod, cluster or group of several with one name: the members of all, each super pod once."""
    listed = {
        name: [member for item in items for member in getattr(item, name)]
        for name in ("server_ids", "super_pod_ids")
        if hasattr(items[0], name)
    }
    if "super_pod_ids" in listed:
        listed["super_pod_ids"] = list(dict.fromkeys(listed["super_pod_ids"]))
    return replace(items[0], **{name: tuple(members) for name, members in listed.items()})


def _join_extras(sources: Sequence[Source], conflicts: list[str], notes: list[str]) -> dict[str, object]:
    """Return the other keys of all tables: equal values stay, others are in conflict."""
    joined: dict[str, object] = {}
    first_of: dict[str, str] = {}
    is_raised = False
    for source, table in sources:
        for key, value in table.extra.items():
            first_of.setdefault(key, source)
            before = joined.setdefault(key, value)
            if _same_json(before, value):
                continue
            if key == DATA_VERSION and type(before) is int and type(value) is int:
                joined[key] = max(before, value)
                is_raised = True
            else:
                conflicts.append(f"{source}: {plain(key)} is not what {first_of[key]} says")
    if is_raised:
        notes.append(f"{DATA_VERSION} is {joined[DATA_VERSION]}, the highest of the tables")
    notes += [
        f"{plain(key)} is not in every table" for key in joined if any(key not in table.extra for _, table in sources)
    ]
    return joined


def _same_json(first: object, second: object) -> bool:
    """True when the two are the same JSON value; the order of keys does not count, and 1, 1.0 and true differ."""
    return first is second or json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def _rank_key(sources: Sequence[Source], ordered: Sequence[Server], order: MergeOrder) -> RankKey:
    """Return what the ranks are counted by; where a dialect has none, it is what its readers count them by."""
    if dialect_of(sources[0][1].dialect).ranks_by_position:
        return lambda place, device: (ordered[place].server_id, device.device_id)
    if order == "argument":
        source_of = [number for number, (_, table) in enumerate(sources) for _ in table.servers]
        return lambda place, device: (source_of[place], device.rank_id)
    return lambda place, device: (place, device.rank_id)


def _describe_ranks(sources: Sequence[Source], servers: Sequence[Server]) -> list[str]:
    """Return a line per table whose ranks have changed, the first few of them."""
    new_of = {(server.group, server.server_id): server for server in servers}
    lines = []
    for source, table in sources:
        pairs = sorted(
            (old.rank_id, new.rank_id)
            for server in table.servers
            for old, new in zip(server.devices, new_of[server.group, server.server_id].devices, strict=True)
        )
        before, after = [old for old, _ in pairs], [new for _, new in pairs]
        if before != after:
            where = "now" if after == sorted(after) else "now, in another order"
            lines.append(f"{source}: its ranks {_fold(before)} are {_fold(sorted(after))} {where}")
    return lines if len(lines) <= _SHOWN else [*lines[: _SHOWN - 1], f"and {len(lines) - _SHOWN + 1} tables more"]


def _fold(ranks: list[int]) -> str:
    text = fold_numbers(ranks)
    return text if len(text) <= _MAX_FOLDED else f"{text[: _MAX_FOLDED - 3]}..."


def _describe_counts(sources: Sequence[Source]) -> list[str]:
    """Say which tables were wrong about their own count, and that servers differ in their devices."""
    notes = [
        f"{source} said server_count {table.declared_server_count} and lists {count_noun(len(table.servers), 'server')}"
        for source, table in sources
        if table.declared_server_count not in (None, len(table.servers))
    ]
    held = [(source, server) for source, table in sources for server in table.servers]
    (usual, _), *others = Counter(len(server.devices) for _, server in held).most_common()
    if others:
        source, odd = next(entry for entry in held if len(entry[1].devices) != usual)
        shown = f"{plain(odd.server_id)} ({source}) has {len(odd.devices)}, most have {usual}"
        notes.append(f"warning: the servers have different numbers of devices: {shown}")
    return notes


def _check_result(merged: RankTable, sources: Sequence[Source], device_target: str, chip: str | None) -> list[str]:
    """Hold the result against every rule: refuse what no table alone shows, warn where the order broke another."""
    source_of = {(server.group, server.server_id): source for source, table in sources for server in table.servers}

    def name_server(place: int) -> str:
        server = merged.servers[place]
        return f"server {plain(server.server_id)} in {source_of[server.group, server.server_id]}"

    has_addresses = any(device.device_ip is not None for _, device in merged.placements)
    passed_over = {"R3"} if has_addresses else {"R3", "R16"}  # the status is what was asked for
    problems = validate_table(merged, device_target=device_target, chip=chip)
    faults = [
        f"{describe(fault, merged, name_server)} ({fault.rule})"
        for fault in problems
        if fault.is_error and fault.rule not in passed_over
    ]
    if faults:
        raise MergeError(faults)
    warnings = {problem.rule: problem for problem in reversed(problems) if problem.rule in _RULES_OF_ORDER}
    return [f"warning: {rule}: {warnings[rule].subject}: {warnings[rule].message}" for rule in sorted(warnings)]
