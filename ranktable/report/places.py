"""Where each rank of a table is: its server, device, super pod and cluster, and its number on the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ranktable.errors import RankNotFoundError
from ranktable.model import Device, RankTable, Server
from ranktable.report.words import plain


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
