"""Builds a rank table from hosts and their devices, and holds it to the rules. Pure: no file, no look at this host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from ranktable.errors import BuildError
from ranktable.hosts.host_list import ListedHost, parse_device_ids, parse_names
from ranktable.kinds import dialect_of, written_names
from ranktable.merge import sort_pods
from ranktable.model import COMPLETED, Device, RankTable, Server, SuperPod
from ranktable.profile import ANY_TARGET, Profile, build_profile
from ranktable.validate import hold_to_rules
from ranktable.values import count_noun, parse_address

ServerOrder = Literal["server_id", "given"]
SERVER_ORDERS: tuple[ServerOrder, ...] = ("server_id", "given")
Devices = int | Sequence[int]
"""A number of devices, which are then 0 to n-1, or the device ids themselves."""
_MAX_DEVICES = 65536
_FIELD = re.compile(r"\{(server|device)(?:\+(\d{1,6}))?\}")


@dataclass(frozen=True, slots=True)
class HostInventory(Server):
    """A host with the devices that a job is to use on it, in the order of their ranks to be."""

    super_pod_id: str | None = None


Owner = TypeVar("Owner", bound=Server)


def build_table(
    servers: Iterable[tuple[str, Devices] | HostInventory],
    *,
    device_ips: Mapping[str, Sequence[str]] | None = None,
    order: ServerOrder = "server_id",
    version: str | None = None,
    device_target: str | None = None,
    chip: str | None = None,
    super_pods: Mapping[str, Sequence[str]] | None = None,
) -> RankTable:
    """Return a table with contiguous ranks over the servers, which are (id, devices) or what a probe found.

    `order` decides which server has rank 0: "server_id" sorts the ids as strings, as HCCL and MindSpore demand
    ("10.0.0.10" before "10.0.0.9"), and the devices of a server by id; "given" keeps the order of the caller.
    `device_ips` has addresses by server id, one per device in the order in which the devices are given.
    `version` is "1.0" or "1.2", which takes its super pods from `super_pods`, an id with its servers, else from what
    the servers say. With `device_target` ("ascend", "gpu", "cpu") or `chip` the table breaks no rule of that profile;
    on gpu and cpu a server whose id is an address gets it as `host_ip`.
    Raises BuildError for input that makes no valid table, and for an unknown target or chip.
    """
    hosts = take_hosts(servers, device_ips)
    profile = None if device_target is None and chip is None else build_profile(device_target or "ascend", chip)
    table = assemble_table(hosts, order=order, version=version, profile=profile, super_pods=super_pods)
    hold_to_rules(table, profile or ANY_TARGET)
    return table


def take_hosts(
    servers: Iterable[tuple[str, Devices] | HostInventory], device_ips: Mapping[str, Sequence[str]] | None = None
) -> tuple[HostInventory, ...]:
    """Return an inventory per server with the addresses of `device_ips` in it; raises BuildError."""
    hosts = tuple(host if isinstance(host, HostInventory) else _take_pair(*host) for host in servers)
    return _give(hosts, "device_ip", device_ips or {}, "address")


def give_super_device_ids(owners: Iterable[Owner], numbers: Mapping[str, Sequence[str]]) -> tuple[Owner, ...]:
    """Return hosts, or the servers of a table, with the super device ids of those that `numbers` names.

    The numbers stand in the order of the devices. Raises BuildError for a server that is not there, for another
    number of devices, and for a device that has another super device id; R24 tells what is wrong with the numbers.
    """
    return _give(tuple(owners), "super_device_id", numbers, "super device id")


def _give(owners: tuple[Owner, ...], key: str, texts: Mapping[str, Sequence[str]], noun: str) -> tuple[Owner, ...]:
    stranger = next(iter(sorted(texts.keys() - {owner.server_id for owner in owners})), None)
    if stranger is not None:
        raise BuildError(f"a {noun} is given for {stranger!r}, which is not one of the servers", "remove it")
    return tuple(_fill(owner, key, texts.get(owner.server_id), noun) for owner in owners)


def _fill(owner: Owner, key: str, texts: Sequence[str] | None, noun: str) -> Owner:
    if texts is None:
        return owner
    if len(texts) != len(owner.devices):
        said = f"{count_noun(len(owner.devices), 'device')}, but {count_noun(len(texts), noun)} for them"
        raise BuildError(f"server {owner.server_id!r} has {said}", "give one per device, in their order")
    pairs = list(zip(owner.devices, texts, strict=True))
    for device, text in pairs:
        if getattr(device, key) not in (None, text):
            message = f"device {device.device_id} of server {owner.server_id!r} has {noun} {getattr(device, key)}"
            raise BuildError(f"{message}, {text} is given", "leave the option out, or correct it")
    return replace(owner, devices=tuple(replace(device, **{key: text}) for device, text in pairs))  # type: ignore[arg-type]


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
    if order not in SERVER_ORDERS:
        raise BuildError(f"order {order!r} is not known", f"choose one of {', '.join(SERVER_ORDERS)}")
    has_ports = profile is None or profile.is_ascend
    _check_hosts(hosts, has_ports)
    is_sorted = order == "server_id"
    ordered = sorted(hosts, key=lambda host: host.server_id) if is_sorted else list(hosts)
    pods = _list_super_pods(ordered, super_pods) if dialect_of(version).reads_super_pods else ()
    servers, rank = [], 0
    for host in ordered:
        found = sorted(host.devices, key=lambda device: device.device_id) if is_sorted else host.devices
        devices = tuple(
            Device(entry.device_id, number, entry.device_ip, entry.super_device_id if pods else None)
            for number, entry in enumerate(found, rank)
        )
        rank += len(devices)
        needs_address = not has_ports and host.host_ip is None and parse_address(host.server_id) is not None
        servers.append(Server(host.server_id, devices, host.server_id if needs_address else host.host_ip, host.pod_ip))
    return RankTable(version, tuple(servers), COMPLETED, len(servers), sort_pods(pods, servers))


def default_file_name(table: RankTable) -> str:
    """Return `rank_table_<n>pcs.json`, the name that the training scripts of MindSpore's tutorials look for."""
    return f"rank_table_{table.world_size}pcs.json"


def _list_super_pods(
    hosts: Sequence[HostInventory], assigned: Mapping[str, Sequence[str]] | None
) -> tuple[SuperPod, ...]:
    """Return the super pods as they are assigned, else as each host says its own; rule R25 tells whether they fit."""
    members = {pod_id: list(server_ids) for pod_id, server_ids in (assigned or {}).items()}
    said = {host.server_id: host.super_pod_id for host in hosts if host.super_pod_id is not None}
    for server_id, pod_id in said.items() if assigned is None else ():
        members.setdefault(pod_id, []).append(server_id)
    if not members:
        remedy = "give --super_pods, or --probe where npu-smi tells it; outside super pods use version 1.0"
        raise BuildError("no super pod of the servers is known, which version 1.2 lists", remedy)
    for pod_id, server_ids in members.items():
        if not pod_id.isprintable():
            raise BuildError(f"super pod id {pod_id!r} is not printable", "give the id that npu-smi says")
        wrong = next((name for name in server_ids if said.get(name, pod_id) != pod_id), None)
        if wrong is not None:
            message = f"server {wrong!r} is assigned to super pod {pod_id!r}, but it says {said[wrong]!r}"
            raise BuildError(message, "leave --super_pods out, or correct it")
    return tuple(SuperPod(pod_id, tuple(server_ids)) for pod_id, server_ids in members.items())


def _take_pair(server_id: str, devices: Devices) -> HostInventory:
    device_ids = range(min(devices, _MAX_DEVICES + 1)) if isinstance(devices, int) else devices
    if not 1 <= len(device_ids) <= _MAX_DEVICES:
        shown = devices if isinstance(devices, int) else len(device_ids)
        raise BuildError(f"server {server_id!r} has {shown} devices", f"give 1 to {_MAX_DEVICES}")
    return HostInventory(server_id, tuple(map(Device, device_ids)))


def _check_hosts(hosts: Sequence[HostInventory], has_ports: bool) -> None:
    """Refuse what makes no table at all; what the rules find in it comes later, but for doubled hosts."""
    if not hosts:
        raise BuildError("no server is given", "give at least one host with devices")
    for host in hosts:
        if not host.server_id.isprintable():
            raise BuildError(f"server id {host.server_id!r} is not printable", "give the address or name of the host")
        with_port = next((device for device in host.devices if device.device_ip is not None), None)
        if with_port is not None and not has_ports:
            owner = f"device {with_port.device_id} of {host.server_id!r}"
            message = f"{owner} has address {with_port.device_ip}, but only Ascend devices"
            raise BuildError(f"{message} have a network port of their own", "leave the device addresses out")


def devices_of(host: ListedHost, option: str | None) -> Sequence[int]:
    """Return the device ids of a host of a list, or those of the option --devices; raises BuildError, HostListError."""
    ids = host.device_ids if option is None else parse_device_ids(option, "--devices")
    if not ids:
        raise BuildError(f"host {host.name!r} has no number of devices", f"write {host.name}:8, or give --devices")
    if host.slots not in (0, len(ids)):
        raise BuildError(f"host {host.name!r} has {host.slots} devices, --devices lists {len(ids)}", "leave one out")
    if 0 < host.max_slots < len(ids):
        fault = f"host {host.name!r} takes {host.max_slots} devices at most (max_slots), --devices lists {len(ids)}"
        raise BuildError(fault, "name fewer")
    return ids


def expand_pattern(pattern: str, servers: Iterable[tuple[str, Sequence[int]]]) -> dict[str, list[str]]:
    """Return the addresses of every device of `servers`, ids with device ids in the order of the host list.

    `{server}` is the place of the server in that list from 0, `{device}` the device id; `+N` adds to either, as in
    `192.168.{device+1}.{server+10}` for clusters that were numbered by rule. Raises BuildError for other fields.
    """
    rest = _FIELD.sub("", pattern)
    if "{" in rest or "}" in rest:
        raise BuildError(f"device_ips pattern {pattern!r} has an unknown field", "use {server}, {device}, {device+1}")

    def fill(server: int, device: int) -> str:
        return _FIELD.sub(lambda match: str((server if match[1] == "server" else device) + int(match[2] or 0)), pattern)

    return {
        server_id: [fill(place, device_id) for device_id in device_ids]
        for place, (server_id, device_ids) in enumerate(servers)
    }


def parse_super_pods(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the server ids of each super pod, `0=node[1-2];1=node3`; raises BuildError, HostListError."""
    pods: dict[str, tuple[str, ...]] = {}
    for part in (part.strip() for text in texts for part in text.split(";")):
        pod_id, equals, hosts = part.partition("=")
        if not equals or not pod_id.strip():
            raise BuildError(f"--super_pods: {part!r} has no id before its hosts", "write --super_pods 0=node[1-2]")
        if pod_id.strip() in pods:
            raise BuildError(f"--super_pods: super pod {pod_id.strip()!r} is given twice", "name all its hosts at once")
        pods[pod_id.strip()] = tuple(parse_names(hosts, f"--super_pods {part!r}"))
    return pods
