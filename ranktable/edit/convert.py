"""A table in another dialect or as a host file, and what is lost in it.

Ranks, device ids and addresses are carried over as they are; no address, device id or super device id is made up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ranktable.errors import BuildError
from ranktable.hosts.names import check_host_name
from ranktable.kinds import Converted, ConvertWishes, all_dialects, dialect_of
from ranktable.model import COMPLETED, RankTable, Server
from ranktable.ordering import number_devices
from ranktable.text import count_noun, plain

EXTRAS = "extra"
"""Stands for every key that the model does not know by name."""


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


def list_losses(table: RankTable, keeps: Collection[str]) -> tuple[str, ...]:
    """Return what `table` says and a format that keeps the keys `keeps` does not, such as `device_ip of 16 devices`.

    Servers, their devices in the order of rank, and the version are no loss anywhere. Device ids are one only where a
    server's are not 0, 1, 2, ... in the order of rank, which is what a format without ids stands for.
    """
    lost = [text for key, text in _describe_keys(table) if key not in keeps]
    if EXTRAS not in keeps:
        lost += [text for key, text in _describe_extras(table) if key not in keeps]
    return tuple(lost)


def _describe_keys(table: RankTable) -> Iterator[tuple[str, str]]:
    """Yield each key that the table uses with how often it does."""
    if table.status != COMPLETED:
        yield "status", f"the status {plain(table.status)}"
    odd = sum(_has_odd_ids(device.device_id for device in server.devices) for server in table.servers)
    if odd:
        yield "device_id", f"device_id of the devices of {count_noun(odd, 'server')}"
    devices = [device for _, device in table.placements]
    yield from _counted("device_ip", sum(bool(device.device_ip) for device in devices), "device")
    yield from _counted("super_device_id", sum(device.super_device_id is not None for device in devices), "device")
    yield from _counted("host_ip", sum(server.host_ip is not None for server in table.servers), "server")
    yield from _counted("pod_ip", sum(server.pod_ip is not None for server in table.servers), "server")
    for key, entries, noun in (
        ("super_pod_list", table.super_pods, "super pod"),
        ("cluster_list", table.clusters, "cluster"),
        ("group_list", table.groups, "group"),
    ):
        if entries:
            yield key, f"{key} ({count_noun(len(entries), noun)})"


def _has_odd_ids(device_ids: Iterable[int]) -> bool:
    return any(device_id != place for place, device_id in enumerate(device_ids))


def _describe_extras(table: RankTable) -> Iterator[tuple[str, str]]:
    for key in table.extra:
        yield key, f"{plain(key)} of the table"
    held = (
        ("group", (group.extra for group in table.groups)),
        ("super pod", (pod.extra for pod in table.super_pods)),
        ("cluster", (cluster.extra for cluster in table.clusters)),
        ("server", (server.extra for server in table.servers)),
        ("device", (device.extra for _, device in table.placements)),
    )
    for noun, extras in held:
        for key, number in _count_keys(extras).items():
            yield key, f"{plain(key)} of {count_noun(number, noun)}"


def _count_keys(extras: Iterable[Mapping[str, object]]) -> Counter[str]:
    return Counter(key for extra in extras for key in extra)


def _counted(key: str, number: int, noun: str) -> Iterator[tuple[str, str]]:
    if number:
        yield key, f"{key} of {count_noun(number, noun)}"


def check_ranks(table: RankTable) -> None:
    """Raise BuildError for a table without devices, and for one whose ranks are not 0 to n-1, each once."""
    ranks = [device.rank_id for _, device in table.placements]
    if not ranks:
        raise BuildError("the table has no devices", "nothing can be started from it")
    if sorted(ranks) == list(range(len(ranks))):
        return
    if dialect_of(table.dialect).ranks_per_group:
        raise BuildError("the ranks of the table start again in each of its groups", "it is no table of one job")
    message = f"the ranks of the table are not 0 to {len(ranks) - 1}, each once"
    raise BuildError(message, "run ranktable validate on it first")


def refuse_host_ranks(table: RankTable) -> None:
    """Raise BuildError for a table of version 1.1 with ranks on hosts, in forms where a rank is a device."""
    host_rank = next((device.rank_id for _, device in table.placements if device.device_id < 0), None)
    if host_rank is not None:
        message = f"rank {host_rank} runs on its host and not on a device"
        raise BuildError(message, "only version 1.1 has such ranks")


def join_servers(servers: tuple[Server, ...]) -> tuple[Server, ...]:
    """Put the entries of one server_id together, as HCCL does with the instances of template 2; groups are left out."""
    joined: dict[str, Server] = {}
    for server in servers:
        first = joined.get(server.server_id)
        devices = (*first.devices, *server.devices) if first else server.devices
        joined[server.server_id] = replace(first or server, devices=devices, group=None)
    return tuple(joined.values())
