"""Rules R13 to R16, R22 and R27: addresses of devices and hosts, and their ports.

`device_ip` is never to be made up: HCCL compares it with the address of the real port.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import TypeVar

from ranktable.kinds import dialect_of, find_repeats
from ranktable.model import Device, RankTable, Server
from ranktable.problem import Problem, Severity
from ranktable.profile import Profile
from ranktable.rules import Rule, chip_of, citations, register
from ranktable.values import Address, name_placeholder, parse_address

_Value = TypeVar("_Value", bound=Hashable)

_FIND_IT = "write the address of the device's port: hccn_tool -i DEVICE_ID -ip -g, or address_N of /etc/hccn.conf"
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")
_PORT_KEYS = ("device_port", "device_vnic_port", "host_port", "backup_device_port")
_MAX_PORT = 65535
_FIRST_FREE_PORT = 1024
_DEFAULT_PORT = 16666
_DEFAULT_BACKUP_PORT = 16667
_CONCISE = (citations.CONCISE,)


def read_device_addresses(device: Device) -> list[Address]:
    """Return the addresses of `device_ip`, which may be a list with commas; leave out what is no address."""
    text = device.text("device_ip")
    return [] if text is None else [address for part in text.split(",") if (address := parse_address(part))]


@Rule("R13", "device_ip is the address of a network port", severity="error or warning", sources=_CONCISE)
def check_device_addresses(table: RankTable, profile: Profile) -> Iterator[Problem]:
    """No mask, no mark of a failed tool, no 0.0.0.0, no loopback address (a warning on a single server)."""
    has_no_port = profile.device_target in ("gpu", "cpu")
    remedy = "leave the key out: this kind of device has no such port" if has_no_port else _FIND_IT
    for device in table.devices:
        text = device.text("device_ip")
        faults = (_fault_of(part, table) for part in ([] if text is None else text.split(",")))
        for severity, message in islice(filter(None, faults), 1):
            yield device.complain("device_ip", "R13", message, remedy, severity)


def _fault_of(part: str, table: RankTable) -> tuple[Severity, str] | None:
    address = parse_address(part)
    if address is None:
        return "error", _no_address(part) if part.strip() else "the address is empty"
    if _is_usual(address):
        return None
    if address.is_unspecified or address.is_multicast or address == _BROADCAST:
        return "error", "the address cannot belong to a network port"
    if address.is_loopback:
        return "error" if len(table.servers) > 1 else "warning", "the address is a loopback address"
    return None


def _no_address(text: str) -> str:
    what = name_placeholder(text)
    return f"the address is {what}" if what else "the value is not an IPv4 or IPv6 address"


def _is_usual(address: Address) -> bool:
    """Whether an IPv4 address is in none of the ranges below: the usual case, told in a fraction of the time."""
    return address.version == 4 and 1 << 24 <= (number := int(address)) < 224 << 24 and number >> 24 != 127


@Rule("R14", "device_ip is unique in the whole table", is_whole=True, sources=_CONCISE)
def check_addresses_of_all(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """R14 and R15: the odd ones are reported. A backup address is that of another device by design (R27)."""
    with_address = [(device, addresses) for device in table.devices if (addresses := read_device_addresses(device))]
    family = _most_common(address.version for _, addresses in with_address for address in addresses)
    count = _most_common(len(addresses) for _, addresses in with_address)
    first_devices: dict[Address, Device] = {}
    for device, addresses in with_address:
        for address in addresses:
            if address in first_devices:
                message = f"the same address stands at {first_devices[address].path_of('device_ip')}"
                yield device.complain("device_ip", "R14", message, _FIND_IT)
                break
            first_devices[address] = device
        if any(address.version != family for address in addresses):
            message = f"the other addresses are IPv{family}"
            yield device.complain("device_ip", "R15", message, f"use IPv{family} for every device")
        elif len(addresses) != count:
            message = f"the device has {len(addresses)} addresses, the others have {count}"
            yield device.complain("device_ip", "R15", message, "give every device as many addresses")
    yield from _check_host_addresses(table)


register(
    Rule(
        "R15",
        "all device addresses are of one family and equal in number, and so are all host addresses",
        sources=_CONCISE,
    )
)


def _check_host_addresses(table: RankTable) -> Iterator[Problem]:
    texts = [(server, text) for server in table.servers if (text := server.text("host_ip")) is not None]
    hosts = [(server, text, parse_address(text)) for server, text in texts]
    family = _most_common(address.version for _, _, address in hosts if address)
    for server, text, address in hosts:
        if address is None:
            yield server.complain("host_ip", "R15", _no_address(text), "write the host's address, or leave the key out")
        elif address.version != family:
            message = f"the other host addresses are IPv{family}"
            yield server.complain("host_ip", "R15", message, f"use IPv{family} for every host")


@Rule(
    "R16",
    "device_ip is there where devices talk over their own ports",
    severity="error or warning",
    chips=("910a", "a2", "a3", "300i-duo"),
    sources=(citations.CONCISE, citations.A3_PAGE),
)
def check_device_addresses_present(table: RankTable, profile: Profile) -> Iterator[Problem]:
    """A2 needs it on one server too when HCCL_INTRA_ROCE_ENABLE=1, which no table tells."""
    need = _find_need(table, chip_of(table, profile)) if profile.is_ascend else None
    # Template 2 may write "" for no address (a missing key is R28 too); servers cannot connect without one.
    may_be_empty = dialect_of(table.dialect).writes_empty_addresses
    if need is None or (may_be_empty and len(table.servers) < 2):
        return
    severity, where = need
    if may_be_empty:
        severity, where = "warning", "to connect several servers"
    for device in table.devices:
        if not device.has("device_ip"):
            message = f"the device has no address; HCCL needs it {where}"
            yield device.complain("device_ip", "R16", message, _FIND_IT, severity)


def _find_need(table: RankTable, chip: str | None) -> tuple[Severity, str] | None:
    if chip in ("910a", "300i-duo"):
        return "error", "on 910A and 300I Duo"
    if chip == "a5":
        return None
    if len(table.servers) > 1:
        pods = {pod.super_pod_id for pod in table.super_pods}
        if chip == "a3" and len(pods) == 1:
            return None
        return "error", "between super pods" if chip == "a3" and pods else "in a table of several servers"
    return None if chip else ("warning", "on 910A and 300I Duo")


def _most_common(values: Iterator[_Value]) -> _Value | None:
    ranking = Counter(values).most_common(1)
    return ranking[0][0] if ranking else None


@Rule(
    "R22",
    "ports are 1 to 65535, and host_port is unique on its server",
    severity="error or warning",
    sources=(citations.CONCISE, citations.A3_PAGE),
)
def check_ports(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """Ports below 1024 need privileges, which is worth a warning."""
    for server in table.servers:
        for device in server.devices:
            yield from _check_ranges(device)
        same, remedy = "the same host_port stands at {}", "give each device of a server its own port"
        yield from find_repeats(
            server.devices, "host_port", "R22", same, remedy, lambda device: device.number("host_port")
        )


def _check_ranges(device: Device) -> Iterator[Problem]:
    for key in [key for key in _PORT_KEYS if key in device.members]:
        port = device.number(key)
        if port is None:
            continue
        if not 1 <= port <= _MAX_PORT:
            yield device.complain(key, "R22", f"ports go from 1 to {_MAX_PORT}", "write a port in that range")
        elif port < _FIRST_FREE_PORT:
            message = f"ports below {_FIRST_FREE_PORT} belong to the system"
            yield device.complain(key, "R22", message, f"write a port from {_FIRST_FREE_PORT} on", "warning")


@Rule(
    "R27",
    "backup_device_ip is the address of the other die of the same module, with another port",
    chips=("a3",),
    sources=(citations.CONCISE, citations.A3_PAGE),
)
def check_backups(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """Devices 2k and 2k+1 are the two dies of one module (A3)."""
    for server in table.servers:
        for device in server.devices:
            if device.text("backup_device_ip") is not None:
                yield from _check_backup_address(device, server)
            if device.has("backup_device_ip") or device.has("backup_device_port"):
                yield from _check_backup_port(device)


def _check_backup_address(device: Device, server: Server) -> Iterator[Problem]:
    texts = (device.text("backup_device_ip") or "").split(",")
    addresses = [address for text in texts if (address := parse_address(text))]
    dies = (entry for entry in server.devices if device.device_id >= 0 and entry.device_id == device.device_id ^ 1)
    own, other = read_device_addresses(device), [each for die in dies for each in read_device_addresses(die)]
    message = ""
    if len(addresses) < len(texts):
        message = "the value is not an IPv4 or IPv6 address"
    elif any(address in own for address in addresses):
        message = "the backup address is the device's own address"
    elif other and not all(address in other for address in addresses):
        message = "the backup address is not that of the other die of the module"
    if message:
        remedy = f"write {', '.join(map(str, other))}" if other else "write the device_ip of the other die"
        yield device.complain("backup_device_ip", "R27", message, remedy)


def _check_backup_port(device: Device) -> Iterator[Problem]:
    main = device.number("device_port") if device.has("device_port") else _DEFAULT_PORT
    backup = device.number("backup_device_port") if device.has("backup_device_port") else _DEFAULT_BACKUP_PORT
    if main is not None and main == backup:
        key = "backup_device_port" if device.has("backup_device_port") else "device_port"
        message = f"the backup port and the main port are both {main}"
        yield device.complain(key, "R27", message, "write two different ports")
