"""The part of a table that some ranks, servers or devices make up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches

from ranktable.edit.counts import drop_counts
from ranktable.edit.renumber import has_ranks_by_position, refuse_group_ranks, renumber_ranks
from ranktable.edit.result import Edited
from ranktable.edit.subset import Cutter
from ranktable.errors import EditError
from ranktable.model import Device, RankTable, Server
from ranktable.report.words import count_noun, plain
from ranktable.rules.order import fold_numbers

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_MAX_NUMBERS = 10**6
_MAX_NEAR = 4096
"""Up to so many server ids a near miss is looked for: each comparison costs."""


def select_ranks(table: RankTable, ranks: Iterable[int], *, keep_ranks: bool = False) -> Edited:
    """Return the table of the devices that carry `ranks`. See `select_devices`."""
    return select_devices(table, ranks=ranks, keep_ranks=keep_ranks)


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
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise EditError(
                f"{what} {text[:60]!r} has {part.strip()[:40]!r} for a range", "write a list such as 0-7,12"
            )
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if last < first:
            raise EditError(f"{what} {text[:60]!r} has a range that runs backwards", f"write {last}-{first}")
        if last - first >= _MAX_NUMBERS:
            raise EditError(f"{what} {text[:60]!r} has a range of more than {_MAX_NUMBERS} numbers", "check it")
        numbers.update(range(first, last + 1))
    return numbers


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
        shown = fold_numbers(sorted(missing))[:60]
        raise EditError(f"no chosen server has device {shown}", "choose devices that are there")
    return [_keep(server, [device for device in server.devices if device.device_id in wanted]) for server in servers]


def _by_rank(table: RankTable, servers: Sequence[Server], wanted: set[int] | None) -> Sequence[Server]:
    if wanted is None:
        return servers
    missing = wanted - {device.rank_id for _, device in table.placements}
    if missing:
        shown = fold_numbers(sorted(missing))[:60]
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
        yield f"ranks {_shorten(fold_numbers(ranks))} are ranks {fold_numbers(list(range(len(ranks))))} now"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
