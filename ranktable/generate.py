"""Builds a rank table from servers and their devices. Pure: no file, no network, no look at this host."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ranktable.codec import v1_0
from ranktable.errors import BuildError
from ranktable.model import COMPLETED, Device, RankTable, Server
from ranktable.placeholder import name_placeholder
from ranktable.rules.addresses import parse_address
from ranktable.rules.identity import MAX_SERVER_ID_LENGTH

ServerOrder = Literal["server_id", "numeric", "given"]
SERVER_ORDERS: tuple[ServerOrder, ...] = ("server_id", "numeric", "given")

Devices = int | Sequence[int]
"""A number of devices, which are then 0 to n-1, or the device ids themselves."""
DeviceIps = Mapping[str, Sequence[str]]
"""Addresses by server id, one per device in the order in which the devices are given."""

_MAX_DEVICES = 65536
_DIGITS = re.compile(r"([0-9]+)")


def build_table(
    servers: Iterable[tuple[str, Devices]],
    *,
    device_ips: DeviceIps | None = None,
    order: ServerOrder = "server_id",
) -> RankTable:
    """Return a version 1.0 table with contiguous ranks over the servers.

    `order` decides which server has rank 0: "server_id" sorts the ids as strings, as HCCL and MindSpore demand
    ("10.0.0.10" before "10.0.0.9"); "numeric" sorts addresses and numbers in names by value; "given" keeps the order
    of the caller. The first two also sort the devices of a server by id. `device_ip` is written for servers that
    `device_ips` has, and left out for the others. Raises BuildError for input that makes no valid table.
    """
    listed = [_check_server(server_id, devices) for server_id, devices in servers]
    _check_servers(listed)
    addresses = _pair_addresses(listed, device_ips or {})
    next_rank = 0
    built = []
    for server_id, device_ids in sort_servers(listed, order):
        ordered = device_ids if order == "given" else sorted(device_ids)
        devices = tuple(
            Device(device_id, rank_id, addresses.get((server_id, device_id)))
            for rank_id, device_id in enumerate(ordered, next_rank)
        )
        next_rank += len(devices)
        built.append(Server(server_id, devices))
    return RankTable(v1_0.VERSION, tuple(built), COMPLETED, len(built))


def sort_servers(servers: Iterable[tuple[str, Sequence[int]]], order: ServerOrder) -> list[tuple[str, Sequence[int]]]:
    """Return the servers in the order of their ranks; raises BuildError for an unknown order."""
    if order == "given":
        return list(servers)
    if order == "server_id":
        return sorted(servers, key=lambda server: server[0])
    if order == "numeric":
        return sorted(servers, key=lambda server: (numeric_key(server[0]), server[0]))
    raise BuildError(f"order {order!r} is not known", f"choose one of {', '.join(SERVER_ORDERS)}")


def numeric_key(server_id: str) -> tuple[int, int, tuple[str | int, ...]]:
    """Return a sort key that compares addresses by value, and names by text and numbers in turn; addresses first."""
    address = parse_address(server_id)
    if address is not None:
        return 0, address.version, (int(address),)
    return 1, 0, tuple(int(part) if index % 2 else part for index, part in enumerate(_DIGITS.split(server_id)))


def default_file_name(table: RankTable) -> str:
    """Return `rank_table_<n>pcs.json`, the name that the training scripts of MindSpore's tutorials look for."""
    return f"rank_table_{table.world_size}pcs.json"


def _check_server(server_id: str, devices: Devices) -> tuple[str, Sequence[int]]:
    what = name_placeholder(server_id)
    if what:
        raise BuildError(f"server id {server_id!r} is {what}", "give the address or name of the host")
    if not server_id.strip() or not server_id.isprintable():
        raise BuildError(f"server id {server_id!r} is empty or not printable", "give the address or name of the host")
    if len(server_id) > MAX_SERVER_ID_LENGTH:
        raise BuildError(
            f"server id {server_id!r} has {len(server_id)} characters, at most {MAX_SERVER_ID_LENGTH} are read",
            "use a shorter name or the address",
        )
    device_ids = range(min(devices, _MAX_DEVICES + 1)) if isinstance(devices, int) else tuple(devices)
    if not 1 <= len(device_ids) <= _MAX_DEVICES:
        shown = devices if isinstance(devices, int) else len(device_ids)
        raise BuildError(f"server {server_id!r} has {shown} devices", f"give 1 to {_MAX_DEVICES}")
    bad = next((device_id for device_id in device_ids if not 0 <= device_id < 10**9), None)
    if bad is not None:
        raise BuildError(f"device id {bad} of server {server_id!r} is out of range", "device ids start at 0")
    if len(set(device_ids)) < len(device_ids):
        raise BuildError(f"server {server_id!r} has a device id twice: {list(device_ids)}", "give each id once")
    return server_id, device_ids


def _check_servers(servers: Sequence[tuple[str, Sequence[int]]]) -> None:
    if not servers:
        raise BuildError("no server is given", "give at least one host with devices")
    seen: set[str] = set()
    for server_id, _ in servers:
        if server_id in seen:
            raise BuildError(f"server id {server_id!r} is given twice", "give each host once, with all its devices")
        seen.add(server_id)


def _pair_addresses(servers: Sequence[tuple[str, Sequence[int]]], device_ips: DeviceIps) -> dict[tuple[str, int], str]:
    """Return the address of each device; refuse what R13 to R15 would."""
    listed = dict(servers)
    paired: dict[tuple[str, int], str] = {}
    owners: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, tuple[str, int]] = {}
    for server_id, texts in device_ips.items():
        device_ids = listed.get(server_id)
        if device_ids is None:
            raise BuildError(f"addresses are given for server {server_id!r}, which has no devices", "remove them")
        if len(texts) != len(device_ids):
            message = f"server {server_id!r} has {len(device_ids)} devices and {len(texts)} addresses"
            raise BuildError(message, "give one address per device")
        for device_id, text in zip(device_ids, texts, strict=True):
            address = _check_address(text, server_id, device_id)
            if address in owners:
                other_server, other_device = owners[address]
                message = f"address {text} is given to device {device_id} of {server_id!r}"
                raise BuildError(f"{message} and to device {other_device} of {other_server!r}", "give each its own")
            owners[address] = server_id, device_id
            paired[server_id, device_id] = text
    if len({address.version for address in owners}) > 1:
        raise BuildError("the device addresses mix IPv4 and IPv6", "use one family for every device")
    return paired


def _check_address(text: str, server_id: str, device_id: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = parse_address(text)
    what = name_placeholder(text) or ("not an IPv4 or IPv6 address" if address is None else None)
    if address is not None and (address.is_unspecified or address.is_multicast or address.is_loopback):
        what = "not the address of a network port"
    if address is None or what:
        message = f"address {text!r} of device {device_id} of {server_id!r} is {what}"
        raise BuildError(message, "give what hccn_tool or /etc/hccn.conf says, or leave the addresses out")
    return address
