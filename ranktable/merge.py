"""Merges tables of one job's hosts into one, which is held to every rule.

Source of the order: HCCL and MindSpore ask for the string order of the server ids (rule R11).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from ranktable.errors import BuildError, MergeError, NotReadyError
from ranktable.hosts.brackets import shorten
from ranktable.hosts.ranges import fold_numbers
from ranktable.kinds import written_names
from ranktable.model import COMPLETED, INITIALIZING, RankTable, Server, SuperPod, number_devices
from ranktable.problem import Problem
from ranktable.validate import validate_table
from ranktable.values import count_noun, plain

MergeOrder = Literal["server_id", "argument"]
MERGE_ORDERS: tuple[MergeOrder, ...] = ("server_id", "argument")
Source = tuple[str, RankTable]
"""The name of a file and the table in it."""
_MEANING = {"server_id": "the string order of their ids", "argument": "the order of the arguments"}
_SERVER = re.compile(r"server_list\[(\d+)\]")
_SHOWN = 6


class Edited(NamedTuple):
    """A new table and the lines that its user must know, in the order of their weight."""

    table: RankTable
    notes: tuple[str, ...] = ()


def merge_tables(
    tables: Iterable[RankTable],
    *,
    names: Sequence[str] | None = None,
    order: MergeOrder = "server_id",
    allow_initializing: bool = False,
    device_target: str = "ascend",
    chip: str | None = None,
) -> Edited:
    """Return one table of all servers of `tables`, which messages call by `names` (table 1, table 2, ...).

    Ranks become 0 to n-1: in the string order of the server ids, or ("argument") in the order of the tables and of the
    ranks in each. Super pods of equal ids are joined. The status is "completed" when that of every table is.
    Raises MergeError with every conflict: of servers, ranks, keys, dialects, and what `validate_table` would call an
    error in the result for `device_target` and `chip` (a missing device_ip apart if no device has one); NotReadyError
    for a table that is not completed, unless `allow_initializing`; BuildError for an order or dialect not merged.
    """
    listed = list(tables)
    sources = list(zip(names or [f"table {number}" for number in range(1, len(listed) + 1)], listed, strict=True))
    _check_sources(sources, order, allow_initializing=allow_initializing)
    conflicts = list(_find_conflicts(sources))
    extra = _join_extras(sources, conflicts)
    pods = _join_pods(sources, conflicts)
    if conflicts:
        raise MergeError(conflicts)
    given = [server for _, table in sources for server in table.servers]
    ordered = given if order == "argument" else sorted(given, key=lambda server: server.server_id)
    source_of = {server.server_id: number for number, (_, table) in enumerate(sources) for server in table.servers}
    servers = number_devices(
        ordered,
        lambda place, device: (source_of[ordered[place].server_id] if order == "argument" else place, device.rank_id),
    )
    waiting = [source for source, table in sources if not table.is_ready]
    is_counted = any(table.declared_server_count is not None for _, table in sources)
    merged = RankTable(
        sources[0][1].dialect,
        servers,
        INITIALIZING if waiting else COMPLETED,
        len(servers) if is_counted else None,
        sort_pods(pods, servers),
        extra,
    )
    notes = [*_describe_ranks(sources, servers, order), *_check_result(merged, sources, device_target, chip)]
    if waiting:
        notes.append(f'the status is "{INITIALIZING}": that of {waiting[0]} is not "{COMPLETED}"')
    return Edited(merged, tuple(notes))


def sort_pods(pods: Iterable[SuperPod], servers: Sequence[Server]) -> tuple[SuperPod, ...]:
    """Return super pods, and the servers in them, in the order of a list of servers."""
    place_of = {server.server_id: place for place, server in enumerate(servers)}
    last = len(place_of)
    sorted_within = [
        replace(pod, server_ids=tuple(sorted(pod.server_ids, key=lambda name: place_of.get(name, last))))
        for pod in pods
    ]
    return tuple(sorted(sorted_within, key=lambda pod: min([place_of.get(n, last) for n in pod.server_ids] or [last])))


def _check_sources(sources: Sequence[Source], order: str, *, allow_initializing: bool) -> None:
    """Refuse what cannot be merged at all."""
    if not sources:
        raise BuildError("no table is given", "give at least one")
    if order not in MERGE_ORDERS:
        raise BuildError(f"order {order!r} is not known", f"choose one of {', '.join(MERGE_ORDERS)}")
    for source, table in sources:
        if table.world_size == 0:
            raise BuildError(f"{source} lists no device", "leave it out")
        if table.dialect not in written_names():
            message = f"{source}: a table of dialect {plain(table.dialect)} cannot be merged"
            raise BuildError(message, f"convert it to one of {', '.join(written_names())} first")
        if not table.is_ready and not allow_initializing:
            raise NotReadyError(source)


def _find_conflicts(sources: Sequence[Source]) -> Iterator[str]:
    """Yield a line for every dialect, server and rank that cannot be beside another."""
    first_source, first = sources[0]
    source_of: dict[str, str] = {}
    for source, table in sources:
        device_of: dict[int, str] = {}
        if table.dialect != first.dialect:
            kinds = f"its dialect is {plain(table.dialect)}, that of {first_source} is {plain(first.dialect)}"
            yield f"{source}: {kinds}; convert one of them first"
        for server in table.servers:
            if server.server_id in source_of:
                where = source_of[server.server_id]
                yield f"{source}: server {plain(server.server_id)} stands in {where} already; leave one out"
                continue
            source_of[server.server_id] = source
            for device in server.devices:
                name = f"device {device.device_id} of server {plain(server.server_id)}"
                other = device_of.setdefault(device.rank_id, name)
                if other != name:
                    yield f"{source}: {name} has rank {device.rank_id}, as has {other} in {source}"


def _join_pods(sources: Sequence[Source], conflicts: list[str]) -> list[SuperPod]:
    """Return the super pods in the order of their first appearance, each id once."""
    gathered: dict[str, list[tuple[str, SuperPod]]] = {}
    for source, table in sources:
        for pod in table.super_pods:
            gathered.setdefault(pod.super_pod_id, []).append((source, pod))
    for name, ((first_source, first), *others) in gathered.items():
        conflicts += [
            f"{source}: super pod {plain(name)!r} has other keys than in {first_source}"
            for source, pod in others
            if not _same_json(dict(first.extra), dict(pod.extra))
        ]
    return [
        replace(found[0][1], server_ids=tuple(name for _, pod in found for name in pod.server_ids))
        for found in gathered.values()
    ]


def _join_extras(sources: Sequence[Source], conflicts: list[str]) -> dict[str, object]:
    """Return the other keys of all tables: equal values stay, others are in conflict."""
    joined: dict[str, object] = {}
    first_of: dict[str, str] = {}
    for source, table in sources:
        for key, value in table.extra.items():
            first_of.setdefault(key, source)
            if not _same_json(joined.setdefault(key, value), value):
                conflicts.append(f"{source}: {plain(key)} is not what {first_of[key]} says")
    return joined


def _same_json(first: object, second: object) -> bool:
    """True when the two are the same JSON value; the order of keys does not count, and 1, 1.0 and true differ."""
    return first is second or json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def _describe_ranks(sources: Sequence[Source], servers: Sequence[Server], order: MergeOrder) -> list[str]:
    """Return which order was used, the first few tables whose ranks have changed, and what tables said wrongly."""
    new_of = {server.server_id: server for server in servers}
    lines, counts = [], []
    for source, table in sources:
        pairs = sorted(
            (old.rank_id, new.rank_id)
            for server in table.servers
            for old, new in zip(server.devices, new_of[server.server_id].devices, strict=True)
        )
        before, after = [old for old, _ in pairs], [new for _, new in pairs]
        if before != after:
            where = "now" if after == sorted(after) else "now, in another order"
            was, is_now = shorten(fold_numbers(before)), shorten(fold_numbers(after))
            lines.append(f"{source}: its ranks {was} are {is_now} {where}")
        if table.declared_server_count not in (None, len(table.servers)):
            said = f"{source} said server_count {table.declared_server_count}"
            counts.append(f"{said} and lists {count_noun(len(table.servers), 'server')}")
    first = next(server.server_id for server in servers if 0 in server.ranks)
    used = [f"servers follow {_MEANING[order]}; rank 0 is on {plain(first)}"] if len(servers) > 1 else []
    shown = lines if len(lines) <= _SHOWN else [*lines[: _SHOWN - 1], f"and {len(lines) - _SHOWN + 1} tables more"]
    return [*used, *shown, *counts]


def _check_result(merged: RankTable, sources: Sequence[Source], device_target: str, chip: str | None) -> list[str]:
    """Hold the result against every rule: refuse what no table alone shows, warn where the order broke another."""
    source_of = {server.server_id: source for source, table in sources for server in table.servers}

    def describe(problem: Problem) -> str:
        place = _SERVER.match(problem.path)
        server_id = merged.servers[int(place[1])].server_id if place else None
        where = f"{source_of[server_id]}: server {plain(server_id)}: " if server_id is not None else ""
        return f"{where}{problem.subject}: {problem.message}"

    has_addresses = any(device.device_ip is not None for _, device in merged.placements)
    passed_over = {"R3"} if has_addresses else {"R3", "R16"}  # the status is what was asked for
    problems = validate_table(merged, device_target=device_target, chip=chip)
    faults = [problem for problem in problems if problem.is_error and problem.rule not in passed_over]
    if faults:
        raise MergeError([f"{describe(fault)} ({fault.rule})" for fault in faults])
    warnings = {problem.rule: problem for problem in reversed(problems) if problem.rule in ("R10", "R11", "R26")}
    return [f"warning: {rule}: {warnings[rule].subject}: {warnings[rule].message}" for rule in sorted(warnings)]
