"""Rules R22 and R27: port numbers and backup addresses. Source: HCCL's parser and the A3 rank table page."""

from __future__ import annotations

from collections.abc import Iterator

from ranktable.codec.schema import parse_number
from ranktable.problem import Problem
from ranktable.profile import Profile
from ranktable.rules.addresses import Address, parse_address, read_device_addresses
from ranktable.rules.registry import rule
from ranktable.survey import DeviceEntry, ServerEntry, Survey, find_repeats

_PORT_KEYS = ("device_port", "device_vnic_port", "host_port", "backup_device_port")
_MAX_PORT = 65535
_FIRST_FREE_PORT = 1024
_DEFAULT_PORT = 16666
_DEFAULT_BACKUP_PORT = 16667


@rule("R22", "ports are 1 to 65535, and host_port is unique on its server", severity="error or warning")
def check_ports(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Ports below 1024 need privileges, which is worth a warning."""
    for server in survey.servers:
        for device in server.devices:
            yield from _check_ranges(device)
        same, remedy = "the same host_port stands at {}", "give each device of a server its own port"
        yield from find_repeats(server.devices, "host_port", "R22", same, remedy, _host_port)


def _host_port(device: DeviceEntry) -> int | None:
    return parse_number(device.members.get("host_port"))


def _check_ranges(device: DeviceEntry) -> Iterator[Problem]:
    members = device.members
    for key in [key for key in _PORT_KEYS if key in members]:
        port = parse_number(members[key])
        if port is None:
            continue
        if not 1 <= port <= _MAX_PORT:
            yield device.complain(key, "R22", "error", f"ports go from 1 to {_MAX_PORT}", "write a port in that range")
        elif port < _FIRST_FREE_PORT:
            message = f"ports below {_FIRST_FREE_PORT} belong to the system"
            yield device.complain(key, "R22", "warning", message, f"write a port from {_FIRST_FREE_PORT} on")


@rule("R27", "backup_device_ip is the address of the other die of the same module, with another port", chips=("a3",))
def check_backups(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """Devices 2k and 2k+1 are the two dies of one module (A3)."""
    for server in survey.servers:
        for device in server.devices:
            if device.text("backup_device_ip") is not None:
                yield from _check_backup_address(device, server)
            if device.has("backup_device_ip") or device.has("backup_device_port"):
                yield from _check_backup_port(device)


def _check_backup_address(device: DeviceEntry, server: ServerEntry) -> Iterator[Problem]:
    texts = (device.text("backup_device_ip") or "").split(",")
    addresses = [address for text in texts if (address := parse_address(text))]
    own, other = read_device_addresses(device), _addresses_of_other_die(device, server)
    message = ""
    if len(addresses) < len(texts):
        message = "the value is not an IPv4 or IPv6 address"
    elif any(address in own for address in addresses):
        message = "the backup address is the device's own address"
    elif other and not all(address in other for address in addresses):
        message = "the backup address is not that of the other die of the module"
    if message:
        remedy = f"write {', '.join(map(str, other))}" if other else "write the device_ip of the other die"
        yield device.complain("backup_device_ip", "R27", "error", message, remedy)


def _addresses_of_other_die(device: DeviceEntry, server: ServerEntry) -> list[Address]:
    if device.device_id is None:
        return []
    dies = (entry for entry in server.devices if entry.device_id == (device.device_id or 0) ^ 1)
    return [address for entry in dies for address in read_device_addresses(entry)]


def _check_backup_port(device: DeviceEntry) -> Iterator[Problem]:
    main = parse_number(device.members.get("device_port", str(_DEFAULT_PORT)))
    backup = parse_number(device.members.get("backup_device_port", str(_DEFAULT_BACKUP_PORT)))
    if main is not None and main == backup:
        key = "backup_device_port" if device.has("backup_device_port") else "device_port"
        message = f"the backup port and the main port are both {main}"
        yield device.complain(key, "R27", "error", message, "write two different ports")
