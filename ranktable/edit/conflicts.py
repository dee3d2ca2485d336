"""What has to be looked at before several tables are one: their dialects, and servers and ranks that stand twice."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from ranktable.model import Device, RankTable, Server
from ranktable.report.words import plain

Source = tuple[str, RankTable]
"""The name of a file and the table in it."""

_Held = tuple[str, Server]
"""A server and the file that it stands in."""


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
