"""One table into several: per server, per super pod, or a number of servers each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ranktable.edit.counts import drop_counts
from ranktable.edit.ordering import has_ranks_by_position, refuse_group_ranks, renumber_ranks
from ranktable.edit.select import Cutter
from ranktable.errors import EditError
from ranktable.model import RankTable, Server
from ranktable.report.words import count_noun

SplitUnit = Literal["server", "super_pod"]

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_MAX_NAME = 80


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


_Chunk = tuple[str, Sequence[Server]]


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
