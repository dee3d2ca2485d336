"""A rank table as a person reads it: where each rank is, the planes of its network, and a line per server.

A table has no netmasks. The addresses of one device number over all servers span a network, at most /24 (IPv4) or /64
(IPv6); device numbers whose networks overlap are one plane. Source: the network plans of the 910A (devices i and i+4
share a segment), of the A2 (all share one), and of clusters that give each device number a segment of its own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import TextWrapper

from ranktable.errors import RankNotFoundError
from ranktable.hosts.ranges import fold_numbers
from ranktable.model import Device, RankTable, Server
from ranktable.text import count_noun, plain
from ranktable.values import parse_address

MAX_ROWS = 40
"""Most lines of servers; equal neighbours are folded when there are more, then the middle is left out."""
_LONGEST_PREFIX = {4: 24, 6: 64}
_ROWS_AT_END = 4
_MAX_NAME = 44
_MAX_LISTED = 8
_MAX_WRAPPED = 120
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Place:
    """A server, its place among the servers ordered by lowest rank, and what it belongs to."""

    server: Server
    node_rank: int
    super_pod_id: str | None
    cluster_id: str | None

    @property
    def members(self) -> dict[str, object]:
        """What the table says of the server beside its devices; None for what it does not say."""
        return {
            "host_ip": self.server.host_ip,
            "pod_ip": self.server.pod_ip,
            "super_pod_id": self.super_pod_id,
            "cluster_id": self.cluster_id,
            "group": self.server.group,
        }

    def describe(self, device: Device) -> dict[str, object]:
        """Return where a device of the server is, as an object for JSON; null for what the table does not say."""
        return {
            "rank_id": device.rank_id,
            "server_id": self.server.server_id,
            "node_rank": self.node_rank,
            "local_rank": sum(other.rank_id < device.rank_id for other in self.server.devices),
            "device_id": device.device_id,
            "device_ip": device.device_ip,
            "super_device_id": device.super_device_id,
            **self.members,
        }


def list_servers(table: RankTable) -> tuple[Place, ...]:
    """Return the servers in the order of their ranks; in the order of the file where ranks start again in groups."""
    ranks = [device.rank_id for _, device in table.placements]
    servers = table.servers_by_rank if len(set(ranks)) == len(ranks) else table.servers
    pods = {server_id: pod.super_pod_id for pod in table.super_pods for server_id in pod.server_ids}
    clusters = {server_id: cluster.cluster_id for cluster in table.clusters for server_id in cluster.server_ids}
    by_pod = {pod_id: cluster.cluster_id for cluster in table.clusters for pod_id in cluster.super_pod_ids}
    return tuple(
        Place(server, node_rank, pod_id, clusters.get(server.server_id) or by_pod.get(pod_id or ""))
        for node_rank, server in enumerate(servers)
        for pod_id in (pods.get(server.server_id),)
    )


def list_ranks(table: RankTable, global_rank: int | None = None) -> list[tuple[Place, Device]]:
    """Return every device with its server by rank, or those of one rank: several where each group has ranks from 0.

    Raises RankNotFoundError.
    """
    placed = [(place, device) for place in list_servers(table) for device in place.server.devices]
    placed.sort(key=lambda found: found[1].rank_id)
    if global_rank is None:
        return placed
    found = [(place, device) for place, device in placed if device.rank_id == global_rank]
    if not found:
        raise RankNotFoundError(global_rank, table.world_size)
    return found


def render_rank(place: Place, device: Device) -> str:
    """Return where a device is as lines of name and value; what the table does not say is left out."""
    rows = {name: plain(str(value)) for name, value in place.describe(device).items() if value is not None}
    for noun, extra in (("server", place.server.extra), ("device", device.extra)):
        plain_values = {key: value for key, value in extra.items() if not isinstance(value, dict | list)}
        rows |= {f"{noun} {plain(key)}": plain(str(value)) for key, value in plain_values.items()}
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def find_planes(table: RankTable) -> list[tuple[tuple[int, ...], str]]:
    """Return the device numbers and the network of each plane; none when no device has an address."""
    spans: dict[tuple[int, int], list[int]] = {}
    for _, device in table.placements:
        address = parse_address(device.device_ip.partition(",")[0].strip()) if device.device_ip else None
        if address is not None:
            spans.setdefault((address.version, device.device_id), []).append(int(address))
    networks = sorted((_enclose(version, found), device_id) for (version, device_id), found in spans.items())
    planes: list[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, list[int]]] = []
    for (_, _, network), device_id in networks:
        if planes and planes[-1][0].version == network.version and planes[-1][0].overlaps(network):
            planes[-1][1].append(device_id)
        else:
            planes.append((network, [device_id]))
    return sorted((tuple(sorted(device_ids)), str(network)) for network, device_ids in planes)


def _enclose(version: int, found: list[int]) -> tuple[int, int, ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Return a sort key and the smallest network of the addresses: one sorts before those within it."""
    bits, low = (32 if version == 4 else 128), min(found)
    prefix = min(_LONGEST_PREFIX[version], bits - (low ^ max(found)).bit_length())
    first = low >> (bits - prefix) << (bits - prefix)
    make = ipaddress.IPv4Network if version == 4 else ipaddress.IPv6Network
    return version, first, make((first, prefix))


def overview_as_json(table: RankTable) -> dict[str, object]:
    """Return the table as an object for JSON: counts, planes, and every server in the order of rank."""
    return {
        "dialect": table.dialect,
        "status": table.status,
        "world_size": table.world_size,
        "super_pods": [{"super_pod_id": pod.super_pod_id, "servers": list(pod.server_ids)} for pod in table.super_pods],
        "clusters": [
            {"cluster_id": cluster.cluster_id, "servers": list(cluster.server_ids)}
            | {"super_pods": list(cluster.super_pod_ids)}
            for cluster in table.clusters
        ],
        "groups": [group.name for group in table.groups],
        "planes": [{"device_ids": list(device_ids), "network": network} for device_ids, network in find_planes(table)],
        "servers": [
            {
                "server_id": place.server.server_id,
                "node_rank": place.node_rank,
                "ranks": [device.rank_id for device in place.server.devices],
                "device_ids": [device.device_id for device in place.server.devices],
                "device_ips": [device.device_ip for device in place.server.devices],
                **place.members,
            }
            for place in list_servers(table)
        ],
    }


def render_overview(table: RankTable, *, width: int | None = None, show_all: bool = False) -> str:
    """Return the table as lines of at most `width` characters (None: any), a line per server in the order of rank.

    More than 40 servers are folded: neighbours with the same devices are one line. `show_all` folds nothing.
    """
    rows = [[place] for place in list_servers(table)]
    if len(rows) > MAX_ROWS and not show_all:
        rows = [[place for row in alike for place in row] for _, alike in groupby(rows, key=_shape)]
    wrap = TextWrapper(width or _MAX_WRAPPED, subsequent_indent=_GAP, break_long_words=False, break_on_hyphens=False)
    head = [line for text in _summaries(table) for line in wrap.wrap(text)]
    lines = [*head, "", *_columns(table, rows, show_all=show_all)] if rows else head
    return "\n".join(_cut(line, width) for line in lines)


def _shape(row: list[Place]) -> tuple[object, ...]:
    """Servers that differ in name, ranks and addresses only are alike."""
    place = row[0]
    ids = tuple(device.device_id for device in place.server.devices)
    return ids, place.super_pod_id, place.cluster_id, place.server.group


def _summaries(table: RankTable) -> Iterator[str]:
    counts = sorted({len(server.devices) for server in table.servers})
    each = f" of {' or '.join(map(str, counts[:4]))}{' or more' if len(counts) > 4 else ''}" if counts else ""
    size = f"{count_noun(table.world_size, 'device')} on {count_noun(len(table.servers), 'server')}{each}"
    yield f"version {plain(table.dialect)}, status {plain(table.status)}, {size}"
    sizes = {server.server_id: len(server.devices) for server in table.servers}

    def part(name: str, server_ids: Sequence[str]) -> str:
        devices = sum(sizes.get(server_id, 0) for server_id in server_ids)
        return f"{plain(name)} ({count_noun(len(server_ids), 'server')}, {count_noun(devices, 'device')})"

    yield from _listed("super pod", [part(pod.super_pod_id, pod.server_ids) for pod in table.super_pods])
    clusters = [
        part(cluster.cluster_id, cluster.server_ids)
        if cluster.server_ids
        else f"{plain(cluster.cluster_id)} ({count_noun(len(cluster.super_pod_ids), 'super pod')})"
        for cluster in table.clusters
    ]
    yield from _listed("cluster", clusters)
    yield from _listed("group", [plain(group.name) for group in table.groups])
    planes = [f"{fold_numbers(device_ids, ',')} in {network}" for device_ids, network in find_planes(table)]
    yield from _listed("network plane", planes, " by the addresses: devices ")


def _listed(noun: str, parts: list[str], between: str = ": ") -> Iterator[str]:
    more = [f"and {len(parts) - _MAX_LISTED + 1} more"] if len(parts) > _MAX_LISTED else []
    shown = [*parts[: _MAX_LISTED - 1], *more] if more else parts
    if parts:
        yield f"{count_noun(len(parts), noun)}{between}{', '.join(shown)}"


def _columns(table: RankTable, rows: list[list[Place]], *, show_all: bool) -> Iterator[str]:
    """Yield a heading and a line per row; the addresses come last, because they are what may be cut."""
    left_out = len(rows) - (MAX_ROWS - 1) if len(rows) > MAX_ROWS and not show_all else 0
    shown = rows if not left_out else [*rows[: MAX_ROWS - 1 - _ROWS_AT_END], *rows[-_ROWS_AT_END:]]
    columns = {
        "super pod": bool(table.super_pods),
        "cluster": bool(table.clusters),
        "group": bool(table.groups),
        "device_ip": any(device.device_ip for _, device in table.placements),
    }
    headings = ["server", "ranks", "devices", *(heading for heading, is_there in columns.items() if is_there)]
    cells = [headings, *([_cells(row)[heading] for heading in headings] for row in shown)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    lines = [_GAP.join(f"{cell:<{size}}" for cell, size in zip(line, widths, strict=True)).rstrip() for line in cells]
    if left_out:
        number = sum(map(len, rows)) - sum(map(len, shown))
        lines.insert(len(lines) - _ROWS_AT_END, f"... {count_noun(number, 'server')} more; --all lists every one")
    yield from lines


def _cells(row: list[Place]) -> dict[str, str]:
    names = [_cut(plain(place.server.server_id), _MAX_NAME) for place in (row[0], row[-1])]
    first, is_one = row[0], len(row) == 1
    addresses = [plain(device.device_ip or "-") for place in row for device in place.server.devices]
    return {
        "server": names[0] if is_one else f"{names[0]} .. {names[1]} ({len(row)})",
        "ranks": _fold(rank for place in row for rank in place.server.ranks),
        "devices": _fold(device.device_id for device in first.server.devices),
        "super pod": plain(first.super_pod_id or "-"),
        "cluster": plain(first.cluster_id or "-"),
        "group": plain(first.server.group or "-"),
        "device_ip": ", ".join(addresses) if is_one or not addresses else f"{addresses[0]} .. {addresses[-1]}",
    }


def _fold(numbers: Iterable[int]) -> str:
    return _cut(fold_numbers(numbers, ","), _MAX_NAME) or "-"


def _cut(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else text[: max(0, width - 3)] + "..."
