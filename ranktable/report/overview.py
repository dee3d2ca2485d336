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
from ranktable.values import Address, parse_address

_LONGEST_PREFIX = {4: 24, 6: 64}
_Network = tuple[int, int, int]
"""IP version, first address, prefix length: a network sorts before those within it."""
MAX_ROWS = 40
"""Most lines of servers; equal neighbours are folded when there are more, then the middle is left out."""
_ROWS_AT_END = 4
_MAX_NAME = 44
_MAX_LISTED = 8
_MAX_WRAPPED = 120
_GAP = "  "
_MEMBERSHIP = {
    "super pod": lambda row: plain(row.places[0].super_pod_id or "-"),
    "cluster": lambda row: plain(row.places[0].cluster_id or "-"),
    "group": lambda row: plain(row.places[0].server.group or "-"),
}


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """A server, its place among the servers ordered by lowest rank, and what it belongs to."""

    server: Server
    node_rank: int
    super_pod_id: str | None
    cluster_id: str | None


@dataclass(frozen=True, slots=True)
class Place:
    """A device and where it is; `local_rank` is its place on the server in the order of rank."""

    server: ServerPlace
    device: Device
    local_rank: int


def list_servers(table: RankTable) -> tuple[ServerPlace, ...]:
    """Return the servers in the order of their ranks; in the order of the file where ranks start again in groups."""
    ranks = [device.rank_id for _, device in table.placements]
    servers = table.servers_by_rank if len(set(ranks)) == len(ranks) else table.servers
    pods = {server_id: pod.super_pod_id for pod in table.super_pods for server_id in pod.server_ids}
    clusters = {server_id: cluster.cluster_id for cluster in table.clusters for server_id in cluster.server_ids}
    by_pod = {pod_id: cluster.cluster_id for cluster in table.clusters for pod_id in cluster.super_pod_ids}
    return tuple(
        ServerPlace(server, node_rank, pod_id, clusters.get(server.server_id) or by_pod.get(pod_id or ""))
        for node_rank, server in enumerate(servers)
        for pod_id in (pods.get(server.server_id),)
    )


def list_places(table: RankTable) -> list[Place]:
    """Return every device with its place, by rank."""
    places = [
        Place(server, device, local_rank)
        for server in list_servers(table)
        for local_rank, device in enumerate(sorted(server.server.devices, key=lambda device: device.rank_id))
    ]
    return sorted(places, key=lambda place: place.device.rank_id)


def find_places(table: RankTable, global_rank: int) -> list[Place]:
    """Return the places of a rank, several where ranks start again in every group; raises RankNotFoundError."""
    places = [place for place in list_places(table) if place.device.rank_id == global_rank]
    if not places:
        raise RankNotFoundError(global_rank, table.world_size)
    return places


def place_as_json(place: Place) -> dict[str, object]:
    """Return a place as an object for JSON; null for what the table does not say."""
    server, device = place.server, place.device
    return {
        "rank_id": device.rank_id,
        "server_id": server.server.server_id,
        "node_rank": server.node_rank,
        "local_rank": place.local_rank,
        "device_id": device.device_id,
        "device_ip": device.device_ip,
        "super_device_id": device.super_device_id,
        "host_ip": server.server.host_ip,
        "pod_ip": server.server.pod_ip,
        "super_pod_id": server.super_pod_id,
        "cluster_id": server.cluster_id,
        "group": server.server.group,
    }


def render_place(place: Place) -> str:
    """Return a place as lines of name and value; what the table does not say is left out."""
    known = {name: plain(str(value)) for name, value in place_as_json(place).items() if value is not None}
    rows = {**known, **dict(_list_extras(place))}
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _list_extras(place: Place) -> Iterator[tuple[str, str]]:
    """Yield the other keys of the device and its server that have plain values."""
    for noun, extra in (("server", place.server.server.extra), ("device", place.device.extra)):
        for key, value in extra.items():
            if not isinstance(value, dict | list):
                yield f"{noun} {plain(key)}", plain(str(value))


@dataclass(frozen=True, slots=True)
class Plane:
    """Device numbers that share a network, and that network."""

    device_ids: tuple[int, ...]
    network: str


def find_planes(table: RankTable) -> tuple[Plane, ...]:
    """Return the planes of a table by their lowest device number; none when no device has an address."""
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for _, device in table.placements:
        address = _first_address(device.device_ip)
        if address is not None:
            key, number = (address.version, device.device_id), int(address)
            low, high = spans.get(key, (number, number))
            spans[key] = min(low, number), max(high, number)
    networks = sorted((_enclose(version, *span), device_id) for (version, device_id), span in spans.items())
    return tuple(sorted(_merge(networks), key=lambda plane: plane.device_ids))


def _first_address(text: str | None) -> Address | None:
    return parse_address(text.partition(",")[0].strip()) if text else None


def _enclose(version: int, low: int, high: int) -> _Network:
    bits = 32 if version == 4 else 128
    prefix = min(_LONGEST_PREFIX[version], bits - (low ^ high).bit_length())
    return version, low >> (bits - prefix) << (bits - prefix), prefix


def _merge(networks: Iterable[tuple[_Network, int]]) -> list[Plane]:
    """Put networks that overlap together; of two that do, one lies within the other."""
    planes: list[tuple[_Network, list[int]]] = []
    for network, device_id in networks:
        if planes and _contains(planes[-1][0], network):
            planes[-1][1].append(device_id)
        else:
            planes.append((network, [device_id]))
    return [Plane(tuple(sorted(device_ids)), _write(network)) for network, device_ids in planes]


def _contains(outer: _Network, inner: _Network) -> bool:
    bits = 32 if outer[0] == 4 else 128
    return outer[0] == inner[0] and inner[1] >> (bits - outer[2]) == outer[1] >> (bits - outer[2])


def _write(network: _Network) -> str:
    version, first, prefix = network
    address = ipaddress.IPv4Address(first) if version == 4 else ipaddress.IPv6Address(first)
    return f"{address}/{prefix}"


@dataclass(frozen=True, slots=True)
class _Row:
    """Servers in a row that differ in name, ranks and addresses only."""

    places: tuple[ServerPlace, ...]

    @property
    def shape(self) -> tuple[object, ...]:
        first = self.places[0]
        ids = tuple(device.device_id for device in first.server.devices)
        return ids, first.super_pod_id, first.cluster_id, first.server.group

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for place in self.places for rank in place.server.ranks)

    @property
    def addresses(self) -> list[str]:
        return [device.device_ip or "-" for place in self.places for device in place.server.devices]


def render_overview(table: RankTable, *, width: int | None = None, show_all: bool = False) -> str:
    """Return the table as lines of at most `width` characters (None: any), a line per server in the order of rank.

    More than 40 servers are folded: neighbours with the same devices are one line. `show_all` folds nothing.
    """
    servers = list_servers(table)
    rows = [_Row((place,)) for place in servers]
    if len(rows) > MAX_ROWS and not show_all:
        rows = _fold(rows)
    wrap = TextWrapper(width or _MAX_WRAPPED, subsequent_indent=_GAP, break_long_words=False, break_on_hyphens=False)
    head = [line for text in (_headline(table), *_summaries(table)) for line in wrap.wrap(text)]
    lines = [*head, "", *_columns(table, rows, show_all=show_all)] if rows else head
    return "\n".join(_cut(line, width) for line in lines)


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
        "planes": [{"device_ids": list(plane.device_ids), "network": plane.network} for plane in find_planes(table)],
        "servers": [_server_as_json(place) for place in list_servers(table)],
    }


def _server_as_json(place: ServerPlace) -> dict[str, object]:
    server = place.server
    return {
        "server_id": server.server_id,
        "node_rank": place.node_rank,
        "ranks": [device.rank_id for device in server.devices],
        "device_ids": [device.device_id for device in server.devices],
        "device_ips": [device.device_ip for device in server.devices],
        "host_ip": server.host_ip,
        "pod_ip": server.pod_ip,
        "super_pod_id": place.super_pod_id,
        "cluster_id": place.cluster_id,
        "group": server.group,
    }


def _headline(table: RankTable) -> str:
    counts = sorted({len(server.devices) for server in table.servers})
    each = f" of {' or '.join(map(str, counts[:4]))}{' or more' if len(counts) > 4 else ''}" if counts else ""
    size = f"{count_noun(table.world_size, 'device')} on {count_noun(len(table.servers), 'server')}{each}"
    return f"version {plain(table.dialect)}, status {plain(table.status)}, {size}"


def _summaries(table: RankTable) -> Iterator[str]:
    sizes = {server.server_id: len(server.devices) for server in table.servers}
    pods = [(pod.super_pod_id, pod.server_ids) for pod in table.super_pods]
    if pods:
        described = [_describe_part(pod_id, server_ids, sizes) for pod_id, server_ids in pods]
        yield f"{count_noun(len(pods), 'super pod')}: {_shorten_list(described)}"
    if table.clusters:
        described = [
            _describe_part(cluster.cluster_id, cluster.server_ids, sizes)
            if cluster.server_ids
            else f"{plain(cluster.cluster_id)} ({count_noun(len(cluster.super_pod_ids), 'super pod')})"
            for cluster in table.clusters
        ]
        yield f"{count_noun(len(described), 'cluster')}: {_shorten_list(described)}"
    if table.groups:
        yield f"{count_noun(len(table.groups), 'group')}: {_shorten_list([plain(g.name) for g in table.groups])}"
    planes = find_planes(table)
    if planes:
        described = [f"{_fold_ids(plane.device_ids)} in {plane.network}" for plane in planes]
        yield f"{count_noun(len(planes), 'network plane')} by the addresses: devices {_shorten_list(described)}"


def _describe_part(name: str, server_ids: Sequence[str], sizes: dict[str, int]) -> str:
    devices = sum(sizes.get(server_id, 0) for server_id in server_ids)
    return f"{plain(name)} ({count_noun(len(server_ids), 'server')}, {count_noun(devices, 'device')})"


def _shorten_list(parts: list[str]) -> str:
    if len(parts) <= _MAX_LISTED:
        return ", ".join(parts)
    return ", ".join([*parts[: _MAX_LISTED - 1], f"and {len(parts) - _MAX_LISTED + 1} more"])


def _fold_ids(numbers: Iterable[int]) -> str:
    return fold_numbers(numbers, ",")


def _fold(rows: list[_Row]) -> list[_Row]:
    """Put neighbours of one shape together."""
    groups = (tuple(group) for _, group in groupby(rows, key=lambda row: row.shape))
    return [_Row(tuple(place for row in group for place in row.places)) for group in groups]


def _columns(table: RankTable, rows: list[_Row], *, show_all: bool) -> Iterator[str]:
    """Yield a heading and a line per row; the addresses come last, because they are what may be cut."""
    left_out = 0
    if len(rows) > MAX_ROWS and not show_all:
        left_out = len(rows) - (MAX_ROWS - 1)
    shown = rows if not left_out else [*rows[: MAX_ROWS - 1 - _ROWS_AT_END], *rows[-_ROWS_AT_END:]]
    headings = {"server": _name, "ranks": _ranks, "devices": _device_ids}
    optional = {"super pod": bool(table.super_pods), "cluster": bool(table.clusters), "group": bool(table.groups)}
    headings |= {heading: _MEMBERSHIP[heading] for heading, is_there in optional.items() if is_there}
    if any(device.device_ip for _, device in table.placements):
        headings["device_ip"] = _addresses
    cells = [list(headings), *([describe(row) for describe in headings.values()] for row in shown)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    lines = [_GAP.join(f"{cell:<{size}}" for cell, size in zip(line, widths, strict=True)).rstrip() for line in cells]
    place = len(lines) - _ROWS_AT_END
    if left_out:
        number = sum(len(row.places) for row in rows) - sum(len(row.places) for row in shown)
        lines.insert(place, f"... {count_noun(number, 'server')} more; --all lists every one")
    yield from lines


def _name(row: _Row) -> str:
    first, last = plain(row.places[0].server.server_id), plain(row.places[-1].server.server_id)
    if len(row.places) == 1:
        return _cut(first, _MAX_NAME)
    return f"{_cut(first, _MAX_NAME)} .. {_cut(last, _MAX_NAME)} ({len(row.places)})"


def _ranks(row: _Row) -> str:
    return _cut(_fold_ids(row.ranks), _MAX_NAME) or "-"


def _device_ids(row: _Row) -> str:
    return _cut(_fold_ids(device.device_id for device in row.places[0].server.devices), _MAX_NAME) or "-"


def _addresses(row: _Row) -> str:
    addresses = [plain(address) for address in row.addresses]
    if len(row.places) == 1:
        return ", ".join(addresses)
    return f"{addresses[0]} .. {addresses[-1]}" if addresses else "-"


def _cut(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else text[: max(0, width - 3)] + "..."
