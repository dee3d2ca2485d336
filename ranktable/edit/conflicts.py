"""What several tables cannot have at once: a server, an address, a rank, a number of a super pod twice.

Source: what HCCL's parser refuses in one table (rules R7 to R9, R14, R24), looked for over all and told with the file.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from ranktable.model import Device, RankTable, Server
from ranktable.report.words import plain
from ranktable.rules import registered_rules
from ranktable.rules.addresses import parse_address

Source = tuple[str, RankTable]
"""The name of a file and the table in it."""

_Held = tuple[str, Server]
"""A server and the file that it stands in."""


def find_conflicts(sources: Sequence[Source], *, ranks_stay: bool) -> list[str]:
    """Return a line for every value that stands twice; `ranks_stay` compares ranks over all tables, not in each alone.

    A server that stands twice is one conflict: its devices are not compared as well.
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
    dialect = sources[0][1].dialect
    conflicts += _find_device_ids(held) if _holds("R8", dialect) else ()
    conflicts += _find_ranks(held, ranks_stay)
    conflicts += _find_addresses(held) if _holds("R14", dialect) else ()
    conflicts += _find_super_devices(held, sources)
    return conflicts


def _holds(rule_id: str, dialect: str) -> bool:
    """True when the rule is one of the dialect's: a host and its device may share an address in version 1.1."""
    return any(entry.rule_id == rule_id and dialect in entry.dialects for entry in registered_rules())


def _find_dialects(sources: Sequence[Source]) -> Iterator[str]:
    first_source, first = sources[0]
    for source, table in sources[1:]:
        if table.dialect != first.dialect:
            yield (
                f"{source}: its dialect is {plain(table.dialect)}, that of {first_source} is {plain(first.dialect)}; "
                "convert one of them first"
            )


def _find_device_ids(held: Sequence[_Held]) -> Iterator[str]:
    for source, server in held:
        seen: set[int] = set()
        for device in server.devices:
            if device.device_id in seen:
                yield f"{source}: {_name(server, device)} stands there twice"
            seen.add(device.device_id)


def _find_ranks(held: Sequence[_Held], ranks_stay: bool) -> Iterator[str]:
    first_of: dict[Hashable, str] = {}
    for source, server in held:
        for device in server.devices:
            key = device.rank_id if ranks_stay else (source, device.rank_id)
            if key in first_of:
                yield f"{source}: {_name(server, device)} has rank {device.rank_id}, as has {first_of[key]}"
            else:
                first_of[key] = f"{_name(server, device)} in {source}"


def _find_addresses(held: Sequence[_Held]) -> Iterator[str]:
    first_of: dict[Hashable, tuple[str, Server, Device]] = {}
    for source, server in held:
        for device in server.devices:
            for text in () if device.device_ip is None else device.device_ip.split(","):
                key = parse_address(text) or text
                if key in first_of:
                    first_source, first_server, first = first_of[key]
                    place = f"{_name(first_server, first)} in {first_source}"
                    yield f"{source}: {_name(server, device)} has the device_ip {plain(text)}, as has {place}"
                    break
                first_of[key] = source, server, device


def _find_super_devices(held: Sequence[_Held], sources: Sequence[Source]) -> Iterator[str]:
    pod_of = {
        (source, server_id): pod.super_pod_id
        for source, table in sources
        for pod in table.super_pods
        for server_id in pod.server_ids
    }
    first_of: dict[Hashable, str] = {}
    for source, server in held:
        pod_id = pod_of.get((source, server.server_id))
        for device in server.devices if pod_id is not None else ():
            key = pod_id, device.super_device_id
            if device.super_device_id is not None and key in first_of:
                yield (
                    f"{source}: {_name(server, device)} has the super_device_id {plain(device.super_device_id)}, "
                    f"as has {first_of[key]} in super pod {plain(pod_id or '')}; "
                    "give pods that are not the same different ids"
                )
            first_of.setdefault(key, f"{_name(server, device)} in {source}")


def _name(server: Server, device: Device) -> str:
    return f"device {device.device_id} of server {plain(server.server_id)}"
