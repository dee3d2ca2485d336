"""Rules R22 and R23: ports, and the plan of the network.

Rules R22 and R27: port numbers and backup addresses. Source: HCCL's parser and the A3 rank table page.

Rule R23: the network segments that the device addresses form. Off unless a prefix length is given.

A rank table has no netmasks, so the prefix length must come from the user. Source: the network plans of the deployment
guides: on a 910A devices i and i+4 share a segment, on A2 all devices of a server do; and in every plan the devices
of one number share a segment over the servers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator

from ranktable.codec.schema import parse_number
from ranktable.problem import Problem
from ranktable.profile import Profile
from ranktable.rules.addresses import Address, parse_address, read_device_addresses
from ranktable.rules.chips import chip_of
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


Segment = tuple[int, int]
"""Version of an address, and the number that its first bits are."""

_PLANES: dict[str | None, Callable[[int], int]] = {"910a": lambda device_id: device_id % 4, "a2": lambda _: 0}
"""For each chip with a plan of its own: the devices of a server with equal results share a segment."""


@rule("R23", "device addresses form the segments of the usual network plan (with --network_plan)", severity="warning")
def check_network_plan(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """The first device of each number sets the segment that the others are held to."""
    bits = profile.network_plan
    if bits is None:
        return
    usual: dict[int, tuple[Segment, str]] = {}
    plane_of = _PLANES.get(chip_of(survey, profile))
    for server in survey.servers:
        placed = list(_segments_of(server, bits))
        for device, device_id, segment in placed:
            expected, path = usual.setdefault(device_id, (segment, device.path))
            if segment != expected:
                message = f"device {device_id} is outside segment {_show(expected, bits)} of the one at {path}"
                yield _complain(device, message, "give the devices of one number addresses of one segment")
        if plane_of is not None:
            in_place = [entry for entry in placed if entry[2] == usual[entry[1]][0]]
            yield from _check_server(in_place, plane_of, bits)


def _segments_of(server: ServerEntry, bits: int) -> Iterator[tuple[DeviceEntry, int, Segment]]:
    """A device with several addresses is placed by its first; one whose address is too short for `bits` not at all."""
    for device in server.devices:
        for address in read_device_addresses(device)[:1]:
            if device.device_id is not None and bits <= address.max_prefixlen:
                yield device, device.device_id, (address.version, int(address) >> (address.max_prefixlen - bits))


def _check_server(
    placed: list[tuple[DeviceEntry, int, Segment]], plane_of: Callable[[int], int], bits: int
) -> Iterator[Problem]:
    usual: dict[int, tuple[Segment, int]] = {}
    for device, device_id, segment in placed:
        expected, first = usual.setdefault(plane_of(device_id), (segment, device_id))
        if segment != expected:
            message = f"device {device_id} is outside segment {_show(expected, bits)} of device {first} of its server"
            yield _complain(device, message, "give the devices of one plane addresses of one segment")


def _show(segment: Segment, bits: int) -> str:
    version, prefix = segment
    if version == 4:
        return str(ipaddress.IPv4Network((prefix << (32 - bits), bits)))
    return str(ipaddress.IPv6Network((prefix << (128 - bits), bits)))


def _complain(device: DeviceEntry, message: str, remedy: str) -> Problem:
    return device.complain("device_ip", "R23", "warning", message, remedy)
