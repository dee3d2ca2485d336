"""Rank tables as the files and commands of other launchers.

None of them can hold a whole rank table: `export_table` says what was left out. A new format is an `Exporter` in
`ranktable.export.formats`, and one line in `_EXPORTERS`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Literal

from ranktable.errors import BuildError
from ranktable.model import COMPLETED, Device, RankTable, Server
from ranktable.text import count_noun, plain
from ranktable.values import parse_address

EXTRAS = "extra"
"""Stands for every key that the model does not know by name."""
Address = Literal["server_id", "host_ip", "pod_ip"]
ADDRESSES: tuple[Address, ...] = ("server_id", "host_ip", "pod_ip")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_EXPORTERS = {
    "deepspeed": "DEEPSPEED",
    "openmpi": "OPENMPI",
    "mpich": "MPICH",
    "horovod": "HOROVOD",
    "slurm": "HOSTLIST",
    "slurm-hostfile": "HOSTFILE",
    "torchrun": "TORCHRUN",
    "env": "NODES",
    "env-rank": "RANKS",
    "accelerate": "ACCELERATE",
    "ansible": "INVENTORY",
}
"""The name of each `Exporter` in `ranktable.export.formats`, which is loaded when the first is asked for."""


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


@dataclass(frozen=True, slots=True)
class Exporter:
    """A format: what to call it, how to write it, and what it keeps of a table."""

    title: str
    render: Callable[[Job], dict[str, str]]
    """The text of each file by its name; a format of one file has one without a name."""
    keeps: frozenset[str] = frozenset()
    """Keys of `ranktable.export` that the format holds."""
    keeps_ranks: bool = False
    """True when it names the rank of each device; False when ranks count up from host to host."""
    find_losses: Callable[[Job], tuple[str, ...]] = lambda _job: ()
    """What else it cannot hold of this job."""


@dataclass(frozen=True, slots=True)
class Export:
    """A table in the format of another launcher."""

    files: Mapping[str, str]
    """The text of each file by its name; a format of one file has one without a name."""
    lost: tuple[str, ...]
    """What the table says and the format cannot, in words."""
    invented: tuple[str, ...] = ()
    """What the format demands and the table does not say, in words."""
    is_renumbered: bool = False
    """True when the ranks of the format are not those of the table."""

    @property
    def is_folder(self) -> bool:
        """True when the format is several files."""
        return "" not in self.files

    @property
    def text(self) -> str:
        """The whole as one text, with the name of each file before it as a comment when there are several."""
        return "".join(f"# {name}\n{text}" if name else text for name, text in self.files.items())


def export_names() -> tuple[str, ...]:
    """Return the short names of the formats."""
    return tuple(_EXPORTERS)


def exporter_of(name: str) -> Exporter:
    """Return the format of that short name; raises BuildError."""
    if name not in _EXPORTERS:
        raise BuildError(f"format {name!r} is not known", f"choose one of {', '.join(_EXPORTERS)}")
    exporter: Exporter = getattr(import_module("ranktable.export.formats"), _EXPORTERS[name])
    return exporter


def export_table(
    table: RankTable,
    to: str,
    *,
    address: Address = "server_id",
    master_port: int = 29500,
    command: tuple[str, ...] = ("train.py",),
    device_target: str = "ascend",
    renumber: bool = False,
) -> Export:
    """Return `table` in the format `to` (one of `export_names()`), with a list of what the format cannot hold.

    `address` names the key that gives the names of the hosts; `master_port`, `command` (script and arguments) and
    `device_target` ("ascend", "gpu", "cpu") stand in the formats that have a place for them. A format that numbers
    the ranks itself is refused for a table with other ranks, unless `renumber`. Raises BuildError.
    """
    exporter = exporter_of(to)
    nodes = list_nodes(table, address)
    if "device_id" in exporter.keeps:
        refuse_host_ranks(table)
    needs_renumbering = not exporter.keeps_ranks and not follows_nodes(nodes)
    if needs_renumbering and not renumber:
        message = f"{exporter.title} numbers the ranks host by host, which the ranks of this table do not follow"
        raise BuildError(message, "give --renumber to have them numbered so")
    if needs_renumbering:
        nodes = _renumber(nodes)
    job = Job(nodes, master_port, command, device_target)
    ordered = replace(table, servers=tuple(replace(server, devices=_by_rank(server)) for server in table.servers))
    lost = (*list_losses(ordered, exporter.keeps | {address}), *exporter.find_losses(job))
    return Export(exporter.render(job), lost, _find_invented(table, address), needs_renumbering)


def _find_invented(table: RankTable, address: Address) -> tuple[str, ...]:
    if table.dialect == "2.0" and address == "server_id":
        return ("the names of the hosts: a version 2.0 table has none, so they are its net_instance_ids",)
    return ()


def _renumber(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the hosts with ranks that count up from host to host."""
    ranks = iter(range(sum(len(node.devices) for node in nodes)))
    return tuple(
        replace(node, devices=tuple(replace(device, rank_id=next(ranks)) for device in node.devices)) for node in nodes
    )


def _by_rank(server: Server) -> tuple[Device, ...]:
    return tuple(sorted(server.devices, key=lambda device: device.rank_id))
