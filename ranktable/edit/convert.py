"""A table in another dialect, with a list of what the dialect cannot hold and of what had to be made up for it.

Ranks, device ids and addresses are carried over as they are; no address, device id or super device id is made up.
"""

from __future__ import annotations

from dataclasses import replace

from ranktable.edit.losses import check_ranks, list_losses, refuse_host_ranks
from ranktable.errors import BuildError
from ranktable.hosts.names import check_host_name
from ranktable.kinds import Converted, ConvertWishes, all_dialects
from ranktable.model import RankTable
from ranktable.ordering import number_devices


def dialect_names() -> tuple[str, ...]:
    """Return the dialects that a table can be converted to."""
    return tuple(kind.name for kind in all_dialects() if kind.convert)


def refused_names() -> tuple[str, ...]:
    """Return the dialects that exist and that nothing can be converted to."""
    return tuple(kind.name for kind in all_dialects() if kind.refusal)


def convert_table(table: RankTable, to: str, wishes: ConvertWishes | None = None) -> Converted:
    """Return `table` in the dialect `to` (one of `dialect_names()`); in its own dialect it is returned as it is.

    Raises BuildError for dialects that cannot be written out of others, for ranks that are not 0 to n-1, and for
    what `to` demands and neither the table nor `wishes` say.
    """
    if to == table.dialect:
        return Converted(table)
    kind = next((kind for kind in all_dialects() if kind.name == to), None)
    if kind is not None and kind.refusal:
        raise BuildError(f"nothing can be converted to {to}", kind.refusal)
    if kind is None or kind.convert is None:
        raise BuildError(f"dialect {to!r} is not known", f"choose one of {', '.join(dialect_names())}")
    check_ranks(table)
    refuse_host_ranks(table)
    return kind.convert(table, wishes or ConvertWishes())


def write_hostfile(table: RankTable, *, renumber: bool = False) -> tuple[str, Converted]:
    """Return `host slots=8` lines, and what they cannot hold: launchers number the ranks host by host in their order.

    Raises BuildError for other ranks, unless they may be numbered anew; HostListError for an id that is no host.
    """
    check_ranks(table)
    servers = [server for server in table.servers_by_rank if server.devices]
    for server in servers:
        check_host_name(server.server_id)
    ordered = replace(table, servers=number_devices(servers, lambda place, device: (place, device.rank_id)))
    is_moved = [server.ranks for server in servers] != [server.ranks for server in ordered.servers]
    if is_moved and not renumber:
        message = "a host file numbers the ranks host by host, which the ranks of this table do not follow"
        raise BuildError(message, "give --renumber to have them numbered so")
    text = "".join(f"{server.server_id} slots={len(server.devices)}\n" for server in ordered.servers)
    by_rank = (sorted(server.devices, key=lambda device: device.rank_id) for server in ordered.servers)
    listed = replace(
        ordered,
        servers=tuple(
            replace(server, devices=tuple(devices)) for server, devices in zip(ordered.servers, by_rank, strict=True)
        ),
    )
    return text, Converted(listed, list_losses(listed, ()), is_renumbered=is_moved)
