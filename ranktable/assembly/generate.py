"""Builds a rank table from hosts and their devices. Pure: no file, no network, no look at this host.

What validation says of a table that was just made, in the words of who made it: servers and devices, not paths.

What is built is then validated (`ranktable.validate`), for its device target and chip where they are known: what breaks
a rule is refused with the id of the rule, in the words of the input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ranktable.assembly.inventory import FoundDevice, HostInventory
from ranktable.assembly.super_pods import build_super_pods
from ranktable.collector import paused_collector
from ranktable.errors import BuildError
from ranktable.model import COMPLETED, Device, RankTable, Server
from ranktable.problem import Problem
from ranktable.profile import ANY_TARGET, Profile, build_profile
from ranktable.rules.addresses import parse_address
from ranktable.validate import judge_table

_PLACE = re.compile(r"server_list\[(\d+)\](?:\.device\[(\d+)\])?[.\w]*")

NameServer = Callable[[int], str]
"""What to call the server at a place of the list."""


def hold_to_rules(table: RankTable, profile: Profile) -> tuple[Problem, ...]:
    """Return the warnings that validation gives; raises BuildError with the rule for the first error."""
    problems = judge_table(table, profile)
    errors = [problem for problem in problems if problem.is_error]
    if errors:
        raise _refuse(errors, table, profile)
    return problems


def describe(problem: Problem, table: RankTable, name_server: NameServer) -> str:
    """Return what is wrong as `device 3 of server 'a': device_ip = "x": message`, without a path in it."""

    def name(match: re.Match[str]) -> str:
        place, index = match.groups()
        server = name_server(int(place))
        device = "" if index is None else f"device {table.servers[int(place)].devices[int(index)].device_id} of "
        return f"{device}{server}"

    where = _PLACE.sub(name, problem.path) if _PLACE.match(problem.path) else "the table"
    key = problem.path.rpartition(".")[2]
    said = key if problem.value is None else f"{key} = {problem.value}"
    return f"{where}: {said}: {_PLACE.sub(name, problem.message)}"


def _refuse(errors: list[Problem], table: RankTable, profile: Profile) -> BuildError:
    first = errors[0]
    what = describe(first, table, lambda place: f"server {table.servers[place].server_id!r}")
    rules = ", ".join(dict.fromkeys(problem.rule for problem in errors[1:]))
    more = f" and {len(errors) - 1} more of {rules}" if len(errors) > 1 else ""
    target = "" if profile is ANY_TARGET else f" for {profile.chip or profile.device_target}"
    return BuildError(f"{what} ({first.rule}{target}{more})", first.remedy)


ServerOrder = Literal["server_id", "numeric", "given", "rank_index"]
SERVER_ORDERS: tuple[ServerOrder, ...] = ("server_id", "numeric", "given", "rank_index")
VERSIONS = ("1.0", "1.2")

Devices = int | Sequence[int]
"""A number of devices, which are then 0 to n-1, or the device ids themselves."""
DeviceIps = Mapping[str, Sequence[str]]
"""Addresses by server id, one per device in the order in which the devices are given."""

_MAX_DEVICES = 65536
_DIGITS = re.compile(r"([0-9]+)")


@paused_collector()
def build_table(
    servers: Iterable[tuple[str, Devices] | HostInventory],
    *,
    device_ips: DeviceIps | None = None,
    order: ServerOrder = "server_id",
    version: str = "1.0",
    device_target: str | None = None,
    chip: str | None = None,
    super_pods: Mapping[str, Sequence[str]] | None = None,
) -> RankTable:
    """Return a table with contiguous ranks over the servers, which are (id, devices) or what a source found.

    `order` decides which server has rank 0: "server_id" sorts the ids as strings, as HCCL and MindSpore demand
    ("10.0.0.10" before "10.0.0.9"); "numeric" sorts addresses and numbers in names by value; "given" keeps the order
    of the caller; "rank_index" takes the place that the scheduler gave. The first two also sort the devices of a
    server by id. `device_ip` is written for the devices whose address is known, and left out for the others.

    `version` is "1.0" or "1.2" (super pods: `super_pods` maps each id to its servers, in place of what the servers
    say). With `device_target` ("ascend", "gpu", "cpu") or `chip` the table breaks no rule of that profile; on gpu and
    cpu a server whose id is an address gets it as `host_ip`.

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
    version: str = "1.0",
    profile: Profile | None = None,
    super_pods: Mapping[str, Sequence[str]] | None = None,
) -> RankTable:
    """Return the table of `hosts`, not yet held to any rule; see `build_table`."""
    if version not in VERSIONS:
        raise BuildError(f"version {version!r} cannot be generated", f"choose one of {', '.join(VERSIONS)}")
    has_ports = profile is None or profile.is_ascend
    _check_hosts(hosts, has_ports)
    ordered = sort_hosts(hosts, order)
    pods = build_super_pods(ordered, super_pods) if version == "1.2" else ()
    servers = _number_servers(ordered, sorts_devices=order in ("server_id", "numeric"), keeps_pods=bool(pods))
    if not has_ports:
        servers = tuple(_give_host_ip(server) for server in servers)
    return RankTable(version, servers, COMPLETED, len(servers), super_pods=pods)


def sort_hosts(hosts: Iterable[HostInventory], order: ServerOrder) -> list[HostInventory]:
    """Return the hosts in the order of their ranks; raises BuildError for an unknown order."""
    if order == "rank_index":
        return _sort_by_rank_index(list(hosts))
    if order not in _SORT_KEYS:
        raise BuildError(f"order {order!r} is not known", f"choose one of {', '.join(SERVER_ORDERS)}")
    key = _SORT_KEYS[order]
    return list(hosts) if key is None else sorted(hosts, key=key)


def numeric_key(server_id: str) -> tuple[int, int, tuple[str | int, ...]]:
    """Return a sort key that compares addresses by value, and names by text and numbers in turn; addresses first."""
    address = parse_address(server_id)
    if address is not None:
        return 0, address.version, (int(address),)
    return 1, 0, tuple(int(part) if index % 2 else part for index, part in enumerate(_DIGITS.split(server_id)))


def default_file_name(table: RankTable) -> str:
    """Return `rank_table_<n>pcs.json`, the name that the training scripts of MindSpore's tutorials look for."""
    return f"rank_table_{table.world_size}pcs.json"


_SORT_KEYS: dict[str, Callable[[HostInventory], tuple[object, ...]] | None] = {
    "server_id": lambda host: (host.server_id,),
    "numeric": lambda host: (numeric_key(host.server_id), host.server_id),
    "given": None,
}


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


def _give_host_ip(server: Server) -> Server:
    is_address = server.host_ip is None and parse_address(server.server_id) is not None
    return replace(server, host_ip=server.server_id) if is_address else server


def _take_pair(server_id: str, devices: Devices) -> HostInventory:
    device_ids = range(min(devices, _MAX_DEVICES + 1)) if isinstance(devices, int) else devices
    if not 1 <= len(device_ids) <= _MAX_DEVICES:
        shown = devices if isinstance(devices, int) else len(device_ids)
        raise BuildError(f"server {server_id!r} has {shown} devices", f"give 1 to {_MAX_DEVICES}")
    return HostInventory(server_id, tuple(FoundDevice(device_id) for device_id in device_ids))


def _give_addresses(host: HostInventory, texts: Sequence[str] | None) -> HostInventory:
    if texts is None:
        return host
    if len(texts) != len(host.devices):
        message = f"server {host.server_id!r} has {len(host.devices)} devices and {len(texts)} addresses"
        raise BuildError(message, "give one address per device")
    pairs = zip(host.devices, texts, strict=True)
    devices = tuple(FoundDevice(device.device_id, text, device.super_device_id) for device, text in pairs)
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
