"""Parts of a table: some servers, devices or ranks of it, or all of it in several tables.

Super pods, clusters and groups are cut down with their servers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Literal

from ranktable.edit import Edited, drop_counts
from ranktable.errors import EditError
from ranktable.hosts.ranges import RangeError, fold_numbers, read_ranges
from ranktable.model import Cluster, Device, Group, RankTable, Server, SuperPod
from ranktable.ordering import has_ranks_by_position, refuse_group_ranks, renumber_ranks
from ranktable.text import count_noun, plain

_Places = dict[str, list[tuple[int, int]]]
_MAX_NUMBERS = 10**6
_MAX_NEAR = 4096
"""Up to so many server ids a near miss is looked for: each comparison costs."""
SplitUnit = Literal["server", "super_pod"]
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_MAX_NAME = 80
_Chunk = tuple[str, Sequence[Server]]


class Cutter:
    """Cuts one table any number of times; the cost of a cut is that of what is kept."""

    def __init__(self, table: RankTable) -> None:
        self._table = table
        self._pods_of = _index(pod.server_ids for pod in table.super_pods)
        self._clusters_of = _index(cluster.server_ids for cluster in table.clusters)
        self._clusters_of_pod = _index(cluster.super_pod_ids for cluster in table.clusters)
        self._peopled_groups = {server.group for server in table.servers}
        self._place_of_group = {group.name: place for place, group in enumerate(table.groups)}
        self._empty_groups = {place for name, place in self._place_of_group.items() if name not in self._peopled_groups}

    def cut(self, servers: Sequence[Server]) -> RankTable:
        """Return the table with `servers` (its own, perhaps with fewer devices) in place of all; ranks stay.

        Super pods and clusters without a server are left out; so are groups, those apart that never had one.
        Raises EditError when no device is left.
        """
        kept = tuple(server for server in servers if server.devices)
        if not kept:
            raise EditError("no device of the table is left", "choose servers, devices or ranks that it has")
        count = None if self._table.declared_server_count is None else len(kept)
        pods = self._cut_pods(kept)
        return replace(
            self._table,
            servers=kept,
            declared_server_count=count,
            super_pods=pods,
            clusters=self._cut_clusters(kept, pods),
            groups=self._cut_groups(kept),
        )

    def pods_of(self, server_id: str) -> tuple[SuperPod, ...]:
        """Return the super pods that name the server."""
        return tuple(self._table.super_pods[place] for place, _ in self._pods_of.get(server_id, ()))

    def _cut_pods(self, kept: Sequence[Server]) -> tuple[SuperPod, ...]:
        found = _gather((server.server_id for server in kept), self._pods_of)
        pods = self._table.super_pods
        return tuple(replace(pods[place], server_ids=found[place]) for place in sorted(found))

    def _cut_clusters(self, kept: Sequence[Server], pods: Sequence[SuperPod]) -> tuple[Cluster, ...]:
        by_server = _gather((server.server_id for server in kept), self._clusters_of)
        by_pod = _gather((pod.super_pod_id for pod in pods), self._clusters_of_pod)
        return tuple(
            replace(
                self._table.clusters[place], server_ids=by_server.get(place, ()), super_pod_ids=by_pod.get(place, ())
            )
            for place in sorted({*by_server, *by_pod})
        )

    def _cut_groups(self, kept: Sequence[Server]) -> tuple[Group, ...]:
        places = {self._place_of_group[server.group] for server in kept if server.group in self._place_of_group}
        return tuple(self._table.groups[place] for place in sorted(places | self._empty_groups))


def _index(lists: Iterable[Sequence[str]]) -> _Places:
    """Return for each name the lists that hold it, and its place in each."""
    places: _Places = {}
    for number, names in enumerate(lists):
        for place, name in enumerate(names):
            places.setdefault(name, []).append((number, place))
    return places


def _gather(names: Iterable[str], places: Mapping[str, Sequence[tuple[int, int]]]) -> dict[int, tuple[str, ...]]:
    """Return for each list the names that it holds, in its own order."""
    found: dict[int, list[tuple[int, str]]] = {}
    for name in dict.fromkeys(names):
        for number, place in places.get(name, ()):
            found.setdefault(number, []).append((place, name))
    return {number: tuple(name for _, name in sorted(pairs)) for number, pairs in found.items()}


def select_devices(
    table: RankTable,
    *,
    ranks: Iterable[int] | None = None,
    servers: Iterable[str] | None = None,
    devices: Iterable[int] | None = None,
    keep_ranks: bool = False,
) -> Edited:
    """Return the table of the devices that every given choice names: global ranks, server ids, device ids.

    Super pods, clusters and groups are cut down too. The ranks become 0 to n-1 in the order that they had, unless
    `keep_ranks`. Raises EditError for a rank or server that the table does not have, for a device id that no chosen
    server has, and when nothing is left.
    """
    refuse_group_ranks(table, "cut down")
    if keep_ranks and has_ranks_by_position(table):
        raise EditError(f"a table of dialect {table.dialect} has no ranks to keep", "leave --keep_ranks out")
    table, wrong_counts = drop_counts(table)
    device_ids = None if devices is None else set(devices)
    chosen = _by_server(table, servers)
    chosen = _by_device(chosen, device_ids)
    chosen = _by_rank(table, chosen, None if ranks is None else set(ranks))
    cut = Cutter(table).cut(chosen)
    notes = (*_describe(table, cut, device_ids, keep_ranks), *wrong_counts)
    return Edited(cut if keep_ranks else renumber_ranks(cut), notes)


def parse_ranges(text: str, what: str) -> set[int]:
    """Return the numbers of a list such as `0-7,12`; `what` names them in the message. Raises EditError."""
    try:
        return set(read_ranges(text, _MAX_NUMBERS))
    except RangeError as error:
        if error.reason == "backwards":
            raise EditError(f"{what} {text[:60]!r} has a range that runs backwards", f"write {error.turned}") from None
        if error.reason == "many":
            raise EditError(f"{what} {text[:60]!r} makes more than {_MAX_NUMBERS} numbers", "check it") from None
        remedy = "write a list such as 0-7,12"
        raise EditError(f"{what} {text[:60]!r} has {error.piece[:40]!r} for a range", remedy) from None


def _by_server(table: RankTable, server_ids: Iterable[str] | None) -> Sequence[Server]:
    if server_ids is None:
        return table.servers
    wanted = dict.fromkeys(server_ids)
    known = {server.server_id for server in table.servers}
    missing = [server_id for server_id in wanted if server_id not in known]
    if missing:
        near = get_close_matches(missing[0], known, n=1) if len(known) <= _MAX_NEAR else []
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        remedy = f"did you mean {near[0]!r}?" if near else "see them with `ranktable show`"
        raise EditError(f"the table has no server {missing[0]!r}{more}", remedy)
    return [server for server in table.servers if server.server_id in wanted]


def _by_device(servers: Sequence[Server], wanted: set[int] | None) -> Sequence[Server]:
    if wanted is None:
        return servers
    missing = wanted - {device.device_id for server in servers for device in server.devices}
    if missing:
        shown = fold_numbers(missing)[:60]
        raise EditError(f"no chosen server has device {shown}", "choose devices that are there")
    return [_keep(server, [device for device in server.devices if device.device_id in wanted]) for server in servers]


def _by_rank(table: RankTable, servers: Sequence[Server], wanted: set[int] | None) -> Sequence[Server]:
    if wanted is None:
        return servers
    missing = wanted - {device.rank_id for _, device in table.placements}
    if missing:
        shown = fold_numbers(missing)[:60]
        raise EditError(f"no device of the table has rank {shown}", f"the table has {table.world_size} devices")
    return [_keep(server, [device for device in server.devices if device.rank_id in wanted]) for server in servers]


def _keep(server: Server, devices: list[Device]) -> Server:
    return server if len(devices) == len(server.devices) else replace(server, devices=tuple(devices))


def _describe(table: RankTable, cut: RankTable, device_ids: set[int] | None, keep_ranks: bool) -> Iterable[str]:
    ranks = sorted(device.rank_id for _, device in cut.placements)
    sizes = f"{len(ranks)} of {count_noun(table.world_size, 'device')}"
    yield f"{sizes} on {len(cut.servers)} of {count_noun(len(table.servers), 'server')}"
    lacking = [server for server in cut.servers if device_ids and len(server.devices) < len(device_ids)]
    if lacking:
        yield f"{count_noun(len(lacking), 'server')} without all of the chosen devices: {plain(lacking[0].server_id)}"
    if ranks == list(range(len(ranks))):
        return
    if keep_ranks:
        yield f"the ranks stay {_shorten(fold_numbers(ranks))}: not a table of its own (rule R9), but one to merge"
    else:
        yield f"ranks {_shorten(fold_numbers(ranks))} are ranks {fold_numbers(range(len(ranks)))} now"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class TablePart:
    """One of the tables that a table was split into; `name` is what its file is to be called."""

    name: str
    table: RankTable


@dataclass(frozen=True, slots=True)
class Split:
    """The parts in the order of the servers, and what the user must know of them."""

    parts: tuple[TablePart, ...]
    notes: tuple[str, ...] = ()


def split_table(table: RankTable, by: SplitUnit | int, *, keep_ranks: bool = False) -> Split:
    """Return one table per server, per super pod, or per `by` servers of the list.

    The ranks of each part start at 0 unless `keep_ranks`; merging the parts that keep theirs in order "rank" gives
    the table again, and so does merging the others in order "argument" where ranks follow the list. The names of the
    parts sort in the order of the list, in every shell. Raises EditError for what has no meaning.
    """
    refuse_group_ranks(table, "split")
    if keep_ranks and has_ranks_by_position(table):
        raise EditError(f"a table of dialect {table.dialect} has no ranks to keep", "leave --keep_ranks out")
    table, notes = drop_counts(table)
    cutter = Cutter(table)
    chunks = _chunk(table, by, cutter)
    width = max(3, len(str(len(chunks) - 1)))
    parts = []
    for number, (label, servers) in enumerate(chunks):
        cut = cutter.cut(servers)
        parts.append(
            TablePart(f"part_{number:0{width}d}_{_safe(label)}.json", cut if keep_ranks else renumber_ranks(cut))
        )
    notes += [*_notes_on_ranks(table, parts, keep_ranks), *_notes_on_order(table, chunks)]
    return Split(tuple(parts), tuple(notes))


def _chunk(table: RankTable, by: SplitUnit | int, cutter: Cutter) -> list[_Chunk]:
    if isinstance(by, int):
        return _chunk_by_number(table, by)
    if by == "server":
        _refuse_empty_servers(table)
        return [(server.server_id, (server,)) for server in table.servers]
    if by == "super_pod":
        return _chunk_by_pod(table, cutter)
    raise EditError(f"a table cannot be split per {by!r}", "choose server, super_pod or a number of servers")


def _chunk_by_number(table: RankTable, size: int) -> list[_Chunk]:
    if size < 1:
        raise EditError(f"a part cannot have {size} servers", "write a number from 1 on")
    _refuse_empty_servers(table)
    starts = range(0, len(table.servers), size)
    return [(table.servers[start].server_id, table.servers[start : start + size]) for start in starts]


def _chunk_by_pod(table: RankTable, cutter: Cutter) -> list[_Chunk]:
    if not table.super_pods:
        message = f"the table (dialect {table.dialect}) has no super pods"
        raise EditError(message, "split it per server or by a number of servers")
    _refuse_empty_servers(table)
    members: dict[str, list[Server]] = {}
    for server in table.servers:
        pods = cutter.pods_of(server.server_id)
        if len(pods) != 1:
            message = f"server {server.server_id!r} is in {count_noun(len(pods), 'super pod')}"
            raise EditError(message, "put every server into exactly one (rule R25)")
        members.setdefault(pods[0].super_pod_id, []).append(server)
    return list(members.items())


def _refuse_empty_servers(table: RankTable) -> None:
    if not table.servers:
        raise EditError("the table lists no server", "there is nothing to split")
    empty = next((server for server in table.servers if not server.devices), None)
    if empty is not None:
        raise EditError(f"server {empty.server_id!r} has no devices", "remove it, or list its devices")


def _safe(label: str) -> str:
    return _UNSAFE.sub("_", label)[:_MAX_NAME]


def _notes_on_ranks(table: RankTable, parts: Sequence[TablePart], keep_ranks: bool) -> tuple[str, ...]:
    if keep_ranks:
        return ("the parts keep their ranks: only the first may be a table of its own (rule R9); merge in order rank",)
    is_listed = all(before < after for before, after in pairwise(device.rank_id for _, device in table.placements))
    if is_listed or len(parts) == 1:
        return ()
    return ("the ranks do not follow the list of the servers, so merging these parts gives other ranks: --keep_ranks",)


def _notes_on_order(table: RankTable, chunks: Sequence[_Chunk]) -> tuple[str, ...]:
    """Say where the parts tear apart what stood otherwise in the list."""
    order = [server for _, servers in chunks for server in servers]
    notes = []
    if any(server is not other for server, other in zip(order, table.servers, strict=True)):
        notes.append("the servers of one super pod are not adjacent in the table (rule R26); merged, they will be")
    counts = Counter(name for part in map(_pods_in(table), chunks) for name in part)
    torn = [pod_id for pod_id, count in counts.items() if count > 1]
    if torn:
        notes.append(f"{count_noun(len(torn), 'super pod')} with servers in several parts, such as {torn[0]}")
    return tuple(notes)


def _pods_in(table: RankTable) -> Callable[[_Chunk], set[str]]:
    pod_of = {server_id: pod.super_pod_id for pod in table.super_pods for server_id in pod.server_ids}
    return lambda chunk: {pod_of[server.server_id] for server in chunk[1] if server.server_id in pod_of}
