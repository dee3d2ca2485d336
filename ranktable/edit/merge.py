"""Merges tables of one job's hosts, or the parts of a table that was split, into one.

What stands in the way is said in the words of the input: dialects, servers and ranks that stand twice, keys that
differ. Super pods, clusters and groups of equal names are joined. The result is held to every rule.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ranktable.edit import Edited, drop_counts
from ranktable.errors import EditError, MergeError, NotReadyError
from ranktable.hosts.ranges import fold_numbers
from ranktable.model import COMPLETED, INITIALIZING, Cluster, Device, Group, RankTable, Server, SuperPod
from ranktable.ordering import (
    MergeOrder,
    RankKey,
    describe_order,
    has_ranks_by_position,
    number_devices,
    refuse_group_ranks,
    sort_holders,
    sort_servers,
)
from ranktable.text import count_noun, plain
from ranktable.validate import describe, validate_table

_Item = TypeVar("_Item", SuperPod, Cluster, Group)

DATA_VERSION = "data_version"
"""Volcano's counter of changes; the highest of several is the newest, and no conflict."""
Source = tuple[str, RankTable]
"""The name of a file and the table in it."""
_Held = tuple[str, Server]
"""A server and the file that it stands in."""
_SHOWN = 6
_RULES_OF_ORDER = frozenset({"R10", "R26"})
_MAX_FOLDED = 40


def _join_extras(sources: Iterable[tuple[str, Mapping[str, object]]]) -> tuple[dict[str, object], list[str], list[str]]:
    """Return the other keys of all sources with notes and conflicts: equal values stay, others are in conflict."""
    joined: dict[str, object] = {}
    first_of: dict[str, str] = {}
    count_of: dict[str, int] = {}
    notes: list[str] = []
    conflicts: list[str] = []
    versions: set[str] = set()
    num_sources = 0
    for source, extra in sources:
        num_sources += 1
        for key, value in extra.items():
            count_of[key] = count_of.get(key, 0) + 1
            if key not in joined:
                joined[key], first_of[key] = value, source
            elif not same_json(joined[key], value):
                newest = _newest(joined[key], value) if key == DATA_VERSION else None
                if newest is None:
                    conflicts.append(f"{source}: {plain(key)} is not what {first_of[key]} says")
                else:
                    joined[key] = newest
                    versions.add(key)
    notes += [f"{key} is {joined[key]}, the highest of the tables" for key in versions]
    notes += [f"{plain(key)} is not in every table" for key, count in count_of.items() if count < num_sources]
    return joined, notes, conflicts


def same_json(first: object, second: object) -> bool:
    """True when the two are the same JSON value; the order of keys does not count, and 1, 1.0 and true differ."""
    return first is second or json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def _newest(first: object, second: object) -> object | None:
    """Return the higher of two counters, None when one is no counter."""
    both = [value for value in (first, second) if isinstance(value, int) and not isinstance(value, bool)]
    return max(both) if len(both) == 2 else None


def _join_named(
    sources: Iterable[tuple[str, Sequence[_Item]]],
    noun: str,
    name_of: Callable[[_Item], str],
    add: Callable[[_Item, Sequence[_Item]], _Item],
    conflicts: list[str],
) -> tuple[tuple[_Item, ...], list[str]]:
    """Return items of one kind in the order of their first appearance, each name once, and a note on each joined one.

    Items of one name with other keys are added to `conflicts`.
    """
    gathered: dict[str, list[tuple[str, _Item]]] = {}
    for source, items in sources:
        for item in items:
            gathered.setdefault(name_of(item), []).append((source, item))
    joined: list[_Item] = []
    notes: list[str] = []
    for name, found in gathered.items():
        first_source, first = found[0]
        for source, item in found[1:]:
            if not same_json(dict(first.extra), dict(item.extra)):
                conflicts.append(f"{source}: {noun} {plain(name)!r} has other keys than in {first_source}")
        joined.append(add(first, [item for _, item in found]) if len(found) > 1 else first)
        if len(found) > 1:
            places = dict.fromkeys(source for source, _ in found)
            notes.append(f"{noun} {plain(name)} is joined out of {_list(list(places))}")
    return tuple(joined), notes


def _add_pod(first: SuperPod, found: Sequence[SuperPod]) -> SuperPod:
    return replace(first, server_ids=tuple(server_id for pod in found for server_id in pod.server_ids))


def _add_cluster(first: Cluster, found: Sequence[Cluster]) -> Cluster:
    server_ids = tuple(server_id for cluster in found for server_id in cluster.server_ids)
    pod_ids = dict.fromkeys(pod_id for cluster in found for pod_id in cluster.super_pod_ids)
    return replace(first, server_ids=server_ids, super_pod_ids=tuple(pod_ids))


def _list(sources: Sequence[str]) -> str:
    shown = ", ".join(sources[:3])
    return shown if len(sources) <= 3 else f"{shown} and {len(sources) - 3} more"


def find_conflicts(sources: Sequence[Source], *, ranks_stay: bool) -> list[str]:
    """Return a line for every dialect, server and rank that cannot be beside another.

    `ranks_stay` compares ranks over all tables, not in each alone. What else the rules of one table forbid is found in
    the merged one.
    """
    conflicts = list(_find_dialects(sources))
    held: list[_Held] = []
    first_of: dict[Hashable, str] = {}
    for source, table in sources:
        for server in table.servers:
            key = server.group, server.server_id
            if key in first_of:
                conflicts.append(
                    f"{source}: server {plain(server.server_id)} stands in {first_of[key]} already; leave one out"
                )
            else:
                first_of[key] = source
                held.append((source, server))
    return [*conflicts, *_find_ranks(held, ranks_stay)]


def _find_dialects(sources: Sequence[Source]) -> Iterator[str]:
    first_source, first = sources[0]
    for source, table in sources[1:]:
        if table.dialect != first.dialect:
            yield (
                f"{source}: its dialect is {plain(table.dialect)}, that of {first_source} is {plain(first.dialect)}; "
                "convert one of them first"
            )


def _find_ranks(held: Sequence[_Held], ranks_stay: bool) -> Iterator[str]:
    first_of: dict[Hashable, str] = {}
    for source, server in held:
        for device in server.devices:
            key = device.rank_id if ranks_stay else (source, device.rank_id)
            if key in first_of:
                yield f"{source}: {_name(server, device)} has rank {device.rank_id}, as has {first_of[key]}"
            else:
                first_of[key] = f"{_name(server, device)} in {source}"


def _name(server: Server, device: Device) -> str:
    return f"device {device.device_id} of server {plain(server.server_id)}"


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
    "rank" keeps every rank, holes apart, so that the parts of a table that was split with its ranks give it back.

    Super pods, clusters and groups of equal names are joined. The status is "completed" when that of every table is.
    Raises MergeError with every conflict: of servers, device ids, addresses, ranks, keys, dialects, and what
    `validate_table` would call an error in the result for `device_target` and `chip` (a missing device_ip apart where
    no device has one: such tables are for CPU and GPU hosts). Raises NotReadyError for a table that is not completed
    unless `allow_initializing`, EditError for an order or a dialect that cannot be merged.
    """
    sources, notes = _drop_counts(_name_tables(list(tables), names))
    for source, table in sources:
        refuse_group_ranks(table, "merged")
        if not table.is_ready and not allow_initializing:
            raise NotReadyError(source)
    if has_ranks_by_position(sources[0][1]) and order != "server_id":
        message = f"a table of dialect {sources[0][1].dialect} cannot have the order {order!r}"
        raise EditError(message, "its readers count the ranks in the string order of the server ids")
    conflicts = find_conflicts(sources, ranks_stay=order == "rank")
    joined, join_notes = _join(sources, conflicts)
    if conflicts:
        raise MergeError(conflicts)
    merged, order_notes = _order(sources, joined, order, hosts)
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


def _drop_counts(sources: Sequence[Source]) -> tuple[list[Source], list[str]]:
    counted = [(source, *drop_counts(table)) for source, table in sources]
    return [entry[:2] for entry in counted], [f"{source}: {note}" for source, _, notes in counted for note in notes]


def _join(sources: Sequence[Source], conflicts: list[str]) -> tuple[RankTable, list[str]]:
    """Return the merged table but for order and ranks, with notes; add to `conflicts`."""
    listed = [(source, table.super_pods) for source, table in sources]
    pods, pod_notes = _join_named(listed, "super pod", lambda pod: pod.super_pod_id, _add_pod, conflicts)
    spanned = [(source, table.clusters) for source, table in sources]
    clusters, cluster_notes = _join_named(
        spanned, "cluster", lambda cluster: cluster.cluster_id, _add_cluster, conflicts
    )
    named = [(source, table.groups) for source, table in sources]
    groups, _ = _join_named(named, "group", lambda group: group.name, lambda first, _: first, conflicts)
    extra, notes, disagreements = _join_extras((source, table.extra) for source, table in sources)
    conflicts += disagreements
    waiting = [source for source, table in sources if not table.is_ready]
    if waiting:
        notes.append(f'the status is "{INITIALIZING}": that of {waiting[0]} is not "{COMPLETED}"')
    servers = tuple(server for _, table in sources for server in table.servers)
    is_counted = any(table.declared_server_count is not None for _, table in sources)
    joined = RankTable(
        sources[0][1].dialect,
        servers,
        INITIALIZING if waiting else COMPLETED,
        len(servers) if is_counted else None,
        pods,
        clusters,
        groups,
        extra,
    )
    return joined, [*pod_notes, *cluster_notes, *notes]


def _order(
    sources: Sequence[Source], joined: RankTable, order: MergeOrder, hosts: Sequence[str] | None
) -> tuple[RankTable, list[str]]:
    ordered = sort_servers(joined.servers, order, hosts)
    servers = number_devices(ordered, _rank_key(sources, ordered, order))
    notes = [*describe_order(joined.servers, servers, order), *_describe_ranks(sources, servers, order)]
    merged = replace(joined, servers=servers)
    return (merged if order in ("argument", "rank") else sort_holders(merged)), notes


def _rank_key(sources: Sequence[Source], ordered: Sequence[Server], order: MergeOrder) -> RankKey:
    """Return what the ranks are counted by; where a dialect has none, it is what its readers count them by."""
    if has_ranks_by_position(sources[0][1]):
        return lambda place, device: (ordered[place].server_id, device.device_id)
    if order == "rank":
        return lambda _place, device: device.rank_id
    if order == "argument":
        source_of = [number for number, (_, table) in enumerate(sources) for _ in table.servers]
        return lambda place, device: (source_of[place], device.rank_id)
    return lambda place, device: (place, device.rank_id)


def _describe_ranks(sources: Sequence[Source], servers: Sequence[Server], order: MergeOrder) -> list[str]:
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
            is_same_order = after == sorted(after)
            where = f"are {_fold(after)} now" if is_same_order else f"are {_fold(sorted(after))} now, in another order"
            lines.append(f"{source}: its ranks {_fold(before)} {where}")
    if order == "rank" and lines:
        lines.insert(0, "warning: the ranks had holes, which are closed")
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
    counts = Counter(len(server.devices) for _, table in sources for server in table.servers)
    if len(counts) > 1:
        (usual, _), *_ = counts.most_common(1)
        source, odd = next(
            (source, server) for source, table in sources for server in table.servers if len(server.devices) != usual
        )
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
    warnings = {problem.rule: problem for problem in reversed(problems) if problem.rule in _RULES_OF_ORDER}
    if faults:
        raise MergeError(faults)
    return [f"warning: {rule}: {warnings[rule].subject}: {warnings[rule].message}" for rule in sorted(warnings)]
