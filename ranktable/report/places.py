"""Where problems stand: paths of a table in words, and the planes of networks that addresses form.

Where each rank of a table is: its server, device, super pod and cluster, and its number on the server.

Network planes: which devices of the servers share a network segment, as far as the addresses tell.

A table has no netmasks. The addresses of one device number over all servers span a network, at most /24 (IPv4) or /64
(IPv6); device numbers whose networks overlap are one plane. Source: the network plans of the 910A (devices i and i+4
share a segment), of the A2 (all share one), and of clusters that give each device number a segment of its own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ranktable.errors import RankNotFoundError
from ranktable.model import Device, RankTable, Server
from ranktable.report.words import plain
from ranktable.rules.addresses import Address, parse_address


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


_LONGEST_PREFIX = {4: 24, 6: 64}


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


_Network = tuple[int, int, int]
"""IP version, first address, prefix length: a network sorts before those within it."""


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
