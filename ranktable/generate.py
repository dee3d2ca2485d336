"""Builds a rank table from hosts and their devices. Pure: no file, no network, no look at this host.

What is built is then validated (`ranktable.validate`), for its device target and chip where they are known: what breaks
a rule is refused with the id of the rule, in the words of who made it: servers and devices, not paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from ranktable.errors import BuildError
from ranktable.kinds import dialect_of, written_names
from ranktable.merge import numeric_key, sort_pods
from ranktable.model import COMPLETED, Device, RankTable, Server, SuperPod, paused_collector
from ranktable.profile import ANY_TARGET, Profile, build_profile
from ranktable.validate import hold_to_rules
from ranktable.values import count_noun, parse_address

ServerOrder = Literal["server_id", "numeric", "given", "rank_index"]
SERVER_ORDERS: tuple[ServerOrder, ...] = ("server_id", "numeric", "given", "rank_index")
Devices = int | Sequence[int]
"""A number of devices, which are then 0 to n-1, or the device ids themselves."""
DeviceIps = Mapping[str, Sequence[str]]
"""Addresses by server id, one per device in the order in which the devices are given."""
_MAX_DEVICES = 65536
_SORT_KEYS: dict[str, Callable[[HostInventory], tuple[object, ...]] | None] = {
    "server_id": lambda host: (host.server_id,),
    "numeric": lambda host: (numeric_key(host.server_id), host.server_id),
    "given": None,
}


@dataclass(frozen=True, slots=True)
class HostInventory(Server):
    """A host that a source found, with the devices that a job is to use on it, in the order of their ranks to be."""

    super_pod_id: str | None = None
    """The super pod that the host stands in."""
    rank_index: int | None = None
    """Place of the host among the others as its scheduler says (`hccl/rankIndex`)."""
    origin: str = ""
    """Where the host was found, such as `hosts.txt:3`, for messages."""


Owner = TypeVar("Owner", bound=Server)


@paused_collector()
def build_table(
    servers: Iterable[tuple[str, Devices] | HostInventory],
    *,
    device_ips: DeviceIps | None = None,
    order: ServerOrder = "server_id",
    version: str | None = None,
    device_target: str | None = None,
    chip: str | None = None,
    super_pods: Mapping[str, Sequence[str]] | None = None,
) -> RankTable:
    """Return a table with contiguous ranks over the servers, which are (id, devices) or what a source found.

    `order` decides which server has rank 0: "server_id" sorts the ids as strings, as HCCL and MindSpore demand
    ("10.0.0.10" before "10.0.0.9"); "numeric" sorts addresses and numbers in names by value; "given" keeps the order
    of the caller; "rank_index" takes the place that the scheduler gave. The first two also sort the devices of a
    server by id. `device_ip` is written for the devices whose address is known, and left out for the others.

    `version` is one of `written_names()`, by default the plain one; one with super pods takes those of `super_pods`, an
    id with its servers, in place of what the servers say. With `device_target` ("ascend", "gpu", "cpu") or `chip` the
    table breaks no rule of that profile; on gpu and cpu a server whose id is an address gets it as `host_ip`.

    Raises BuildError for input that makes no valid table, ProfileError for an unknown target or chip.
    """
    hosts = take_hosts(servers, device_ips)
    profile = None if device_target is None and chip is None else build_profile(device_target or "ascend", chip)
    table = assemble_table(hosts, order=order, version=version, profile=profile, super_pods=super_pods)
    hold_to_rules(table, profile or ANY_TARGET)
    return table


def take_hosts(
    servers: Iterable[tuple[str, Devices] | HostInventory], device_ips: DeviceIps | None = None
) -> list[HostInventory]:
    """Return an inventory per server with the addresses of `device_ips` in it; raises BuildError."""
    hosts = [host if isinstance(host, HostInventory) else _take_pair(*host) for host in servers]
    if device_ips is None:
        return hosts
    known = {host.server_id for host in hosts}
    stranger = next((server_id for server_id in device_ips if server_id not in known), None)
    if stranger is not None:
        raise BuildError(f"addresses are given for server {stranger!r}, which has no devices", "remove them")
    return [_give_addresses(host, device_ips.get(host.server_id)) for host in hosts]


def assemble_table(
    hosts: Sequence[HostInventory],
    *,
    order: ServerOrder = "server_id",
    version: str | None = None,
    profile: Profile | None = None,
    super_pods: Mapping[str, Sequence[str]] | None = None,
) -> RankTable:
    """Return the table of `hosts`, not yet held to any rule; see `build_table`."""
    version = version or written_names()[0]
    if version not in written_names():
        raise BuildError(f"version {version!r} cannot be generated", f"choose one of {', '.join(written_names())}")
    has_ports = profile is None or profile.is_ascend
    _check_hosts(hosts, has_ports)
    ordered = sort_hosts(hosts, order)
    pods = _list_super_pods(ordered, super_pods) if dialect_of(version).reads_super_pods else ()
    servers = _number_servers(ordered, sorts_devices=order in ("server_id", "numeric"), keeps_pods=bool(pods))
    if not has_ports:
        servers = tuple(_give_host_ip(server) for server in servers)
    return RankTable(version, servers, COMPLETED, len(servers), sort_pods(pods, servers))


def sort_hosts(hosts: Iterable[HostInventory], order: ServerOrder) -> list[HostInventory]:
    """Return the hosts in the order of their ranks; raises BuildError for an unknown order."""
    if order == "rank_index":
        return _sort_by_rank_index(list(hosts))
    if order not in _SORT_KEYS:
        raise BuildError(f"order {order!r} is not known", f"choose one of {', '.join(SERVER_ORDERS)}")
    key = _SORT_KEYS[order]
    return list(hosts) if key is None else sorted(hosts, key=key)


def default_file_name(table: RankTable) -> str:
    """Return `rank_table_<n>pcs.json`, the name that the training scripts of MindSpore's tutorials look for."""
    return f"rank_table_{table.world_size}pcs.json"


def _sort_by_rank_index(hosts: list[HostInventory]) -> list[HostInventory]:
    """Order by the scheduler's places; gaps are allowed, doubles and missing places are not."""
    owners: dict[int, HostInventory] = {}
    for host in hosts:
        if host.rank_index is None:
            message = f"server {host.server_id!r} has no rank index, which --order rank_index needs"
            raise BuildError(message, "give pods that have hccl/rankIndex, or choose another order")
        if host.rank_index in owners:
            both = f"servers {owners[host.rank_index].server_id!r} and {host.server_id!r}"
            raise BuildError(f"{both} both have rank index {host.rank_index}", "give each its own")
        owners[host.rank_index] = host
    return [owners[index] for index in sorted(owners)]


def _number_servers(hosts: Iterable[HostInventory], *, sorts_devices: bool, keeps_pods: bool) -> tuple[Server, ...]:
    next_rank = 0
    servers = []
    for host in hosts:
        found = sorted(host.devices, key=lambda device: device.device_id) if sorts_devices else host.devices
        devices = tuple(
            Device(entry.device_id, rank_id, entry.device_ip, entry.super_device_id if keeps_pods else None)
            for rank_id, entry in enumerate(found, next_rank)
        )
        next_rank += len(devices)
        servers.append(Server(host.server_id, devices, host.host_ip, host.pod_ip))
    return tuple(servers)


def _list_super_pods(
    hosts: Sequence[HostInventory], assigned: Mapping[str, Sequence[str]] | None
) -> tuple[SuperPod, ...]:
    """Return the super pods as they are assigned, else as each host says its own; rule R25 tells whether they fit."""
    members = {pod_id: list(server_ids) for pod_id, server_ids in (assigned or {}).items()}
    for host in hosts if assigned is None else ():
        if host.super_pod_id is not None:
            members.setdefault(host.super_pod_id, []).append(host.server_id)
    if not members:
        remedy = "give --super_pods, or captures of npu-smi info -t spod-info; outside super pods use version 1.0"
        raise BuildError("no super pod of the servers is known, which version 1.2 lists", remedy)
    said = {host.server_id: host for host in hosts if host.super_pod_id is not None}
    for pod_id, server_ids in members.items():
        if not pod_id.isprintable():
            raise BuildError(f"super pod id {pod_id!r} is not printable", "give the id that npu-smi says")
        for host in (said[server_id] for server_id in server_ids if server_id in said):
            if host.super_pod_id != pod_id:
                message = (
                    f"server {host.server_id!r} is assigned to super pod {pod_id!r}, but {host.origin or 'its source'}"
                )
                raise BuildError(f"{message} says {host.super_pod_id!r}", "leave --super_pods out, or correct it")
    return tuple(SuperPod(pod_id, tuple(server_ids)) for pod_id, server_ids in members.items())


def give_super_device_ids(owners: Iterable[Owner], numbers: Mapping[str, Sequence[str]]) -> tuple[Owner, ...]:
    """Return hosts, or the servers of a table, with the super device ids of those that `numbers` names.

    The numbers stand in the order of the devices. Raises BuildError for a server that is not there, for another
    number of devices, and for a device that has another super device id; R24 tells what is wrong with the numbers.
    """
    listed = list(owners)
    stranger = next(iter(sorted(numbers.keys() - {owner.server_id for owner in listed})), None)
    if stranger is not None:
        raise BuildError(f"super device ids are given for {stranger!r}, which is not one of the servers", "remove them")
    return tuple(
        _give_numbers(owner, numbers[owner.server_id]) if owner.server_id in numbers else owner for owner in listed
    )


def _give_numbers(owner: Owner, texts: Sequence[str]) -> Owner:
    if len(texts) != len(owner.devices):
        counts = f"{count_noun(len(owner.devices), 'device')} and {count_noun(len(texts), 'super device id')}"
        raise BuildError(f"server {owner.server_id!r} has {counts}", "give one per device, in their order")
    for device, text in zip(owner.devices, texts, strict=True):
        if device.super_device_id not in (None, text):
            message = f"device {device.device_id} of server {owner.server_id!r} has super device id"
            raise BuildError(
                f"{message} {device.super_device_id}, {text} is given", "leave the option out, or correct it"
            )
    pairs = zip(owner.devices, texts, strict=True)
    return replace(owner, devices=tuple(replace(device, super_device_id=text) for device, text in pairs))


def _give_host_ip(server: Server) -> Server:
    is_address = server.host_ip is None and parse_address(server.server_id) is not None
    return replace(server, host_ip=server.server_id) if is_address else server


def _take_pair(server_id: str, devices: Devices) -> HostInventory:
    device_ids = range(min(devices, _MAX_DEVICES + 1)) if isinstance(devices, int) else devices
    if not 1 <= len(device_ids) <= _MAX_DEVICES:
        shown = devices if isinstance(devices, int) else len(device_ids)
        raise BuildError(f"server {server_id!r} has {shown} devices", f"give 1 to {_MAX_DEVICES}")
    return HostInventory(server_id, tuple(map(Device, device_ids)))


def _give_addresses(host: HostInventory, texts: Sequence[str] | None) -> HostInventory:
    if texts is None:
        return host
    if len(texts) != len(host.devices):
        message = f"server {host.server_id!r} has {len(host.devices)} devices and {len(texts)} addresses"
        raise BuildError(message, "give one address per device")
    pairs = zip(host.devices, texts, strict=True)
    devices = tuple(replace(device, device_ip=text) for device, text in pairs)
    return replace(host, devices=devices)


def _check_hosts(hosts: Sequence[HostInventory], has_ports: bool) -> None:
    """Refuse what makes no table at all; what the rules find in it comes later, but for doubled hosts."""
    if not hosts:
        raise BuildError("no server is given", "give at least one host with devices")
    for host in hosts:
        if not host.server_id.isprintable():
            raise BuildError(f"server id {host.server_id!r} is not printable", "give the address or name of the host")
        if not 1 <= len(host.devices) <= _MAX_DEVICES:
            raise BuildError(f"server {host.server_id!r} has {len(host.devices)} devices", f"give 1 to {_MAX_DEVICES}")
        with_port = next((device for device in host.devices if device.device_ip is not None), None)
        if with_port is not None and not has_ports:
            owner = f"device {with_port.device_id} of {host.server_id!r}"
            message = f"{owner} has address {with_port.device_ip}, but only Ascend devices"
            raise BuildError(f"{message} have a network port of their own", "leave the device addresses out")
