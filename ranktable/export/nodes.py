"""The hosts of a table as launchers see them: a name, a place in the order of the ranks, and slots."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ranktable.errors import BuildError
from ranktable.model import Device, RankTable, Server
from ranktable.rules.addresses import parse_address

Address = Literal["server_id", "host_ip", "pod_ip"]
ADDRESSES: tuple[Address, ...] = ("server_id", "host_ip", "pod_ip")

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class Node:
    """One host: `devices` in the order of rank, `node_rank` its place among the hosts by lowest rank."""

    name: str
    node_rank: int
    devices: tuple[Device, ...]
    host_ip: str | None = None
    super_pod_id: str | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of this host in ascending order."""
        return tuple(device.rank_id for device in self.devices)

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The device ids of this host in the order of rank."""
        return tuple(device.device_id for device in self.devices)


@dataclass(frozen=True)
class Job:
    """What an exporter turns into text."""

    nodes: tuple[Node, ...]
    master_port: int = 29500
    command: tuple[str, ...] = field(default=("train.py",))
    """The script and its arguments."""
    device_target: str = "ascend"

    @cached_property
    def world_size(self) -> int:
        """The number of ranks; counted once, because some formats write it for every rank."""
        return sum(len(node.devices) for node in self.nodes)

    @property
    def master(self) -> str:
        """The name of the host of rank 0."""
        return self.nodes[0].name


def list_nodes(table: RankTable, address: Address = "server_id") -> tuple[Node, ...]:
    """Return the hosts of `table` that have devices, ordered by their lowest rank.

    `address` names the key that gives the name of a host. Servers of one name are one host. Raises BuildError for a
    table without devices, ranks that are not 0 to n-1, and names that no launcher can reach.
    """
    check_ranks(table)
    pods = {server_id: pod.super_pod_id for pod in table.super_pods for server_id in pod.server_ids}
    by_name: dict[str, list[Server]] = {}
    for server in table.servers:
        if server.devices:
            by_name.setdefault(_name_of(server, address), []).append(server)
    nodes = [(name, servers, _devices_of(servers)) for name, servers in by_name.items()]
    nodes.sort(key=lambda node: node[2][0].rank_id)
    return tuple(
        Node(name, place, devices, servers[0].host_ip, pods.get(servers[0].server_id))
        for place, (name, servers, devices) in enumerate(nodes)
    )


def check_ranks(table: RankTable) -> None:
    """Raise BuildError for a table without devices, and for one whose ranks are not 0 to n-1, each once."""
    ranks = [device.rank_id for _, device in table.placements]
    if not ranks:
        raise BuildError("the table has no devices", "nothing can be started from it")
    if sorted(ranks) == list(range(len(ranks))):
        return
    if table.dialect == "mindie-global":
        raise BuildError("the ranks of a MindIE table start again in each of its groups", "it is no table of one job")
    message = f"the ranks of the table are not 0 to {len(ranks) - 1}, each once"
    raise BuildError(message, "run ranktable validate on it first")


def refuse_host_ranks(table: RankTable) -> None:
    """Raise BuildError for a table of version 1.1 with ranks on hosts, in forms where a rank is a device."""
    host_rank = next((device.rank_id for _, device in table.placements if device.device_id < 0), None)
    if host_rank is not None:
        message = f"rank {host_rank} runs on its host and not on a device"
        raise BuildError(message, "only version 1.1 has such ranks; select the others first")


def follows_nodes(nodes: Sequence[Node]) -> bool:
    """True when the ranks count up from host to host without a gap, as launchers number them."""
    ranks = [rank for node in nodes for rank in node.ranks]
    return ranks == list(range(len(ranks)))


def refuse_colons(nodes: Sequence[Node], title: str) -> None:
    """Raise BuildError for IPv6 addresses, in formats where a colon stands before the count."""
    name = next((node.name for node in nodes if ":" in node.name), None)
    if name is not None:
        raise BuildError(f"{title} cannot hold the IPv6 address {name}", "give the hosts names")


def _name_of(server: Server, address: Address) -> str:
    name = {"server_id": server.server_id, "host_ip": server.host_ip, "pod_ip": server.pod_ip}[address]
    if name is None:
        raise BuildError(f"server {server.server_id!r} has no {address}", "choose another --address")
    if not _NAME.fullmatch(name) and parse_address(name) is None:
        message = f"{address} {name!r} of server {server.server_id!r} is no host name or address"
        raise BuildError(message, "choose another --address, or correct the table")
    return name


def _devices_of(servers: Sequence[Server]) -> tuple[Device, ...]:
    devices = (device for server in servers for device in server.devices)
    return tuple(sorted(devices, key=lambda device: device.rank_id))
