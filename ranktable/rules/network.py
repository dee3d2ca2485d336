"""Rules R13 to R16, R22, R23 and R27: addresses of devices and hosts, their ports, and the plan of the network.

`device_ip` may be left out where the device has no network port of its own: always for the targets cpu and gpu, and on
Ascend inside one server. It is never to be made up: HCCL compares it with the address of the real port. A rank table
has no netmasks, so R23 is off unless the user gives a prefix length.
R23 is the network plans of the deployment guides: on a 910A devices i and i+4 share a segment, on A2 all devices of a
server do, and in every plan the devices of one number share a segment over the servers.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from ranktable.kinds import DeviceEntry, ServerEntry, Survey, find_repeats
from ranktable.problem import Problem, Severity
from ranktable.profile import Profile
from ranktable.rules import citations
from ranktable.rules.registry import chip_of, rule
from ranktable.values import Address, name_placeholder, parse_address, parse_number

_Value = TypeVar("_Value", bound=Hashable)

_FIND_IT = "write the address of the device's port: hccn_tool -i DEVICE_ID -ip -g, or address_N of /etc/hccn.conf"
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")
_PORT_KEYS = ("device_port", "device_vnic_port", "host_port", "backup_device_port")
_MAX_PORT = 65535
_FIRST_FREE_PORT = 1024
_DEFAULT_PORT = 16666
_DEFAULT_BACKUP_PORT = 16667
Segment = tuple[int, int]
"""Version of an address, and the number that its first bits are."""
_PLANES: dict[str | None, Callable[[int], int]] = {"910a": lambda device_id: device_id % 4, "a2": lambda _: 0}
"""For each chip with a plan of its own: the devices of a server with equal results share a segment."""


_CONCISE = (citations.CONCISE,)


def read_device_addresses(device: DeviceEntry) -> list[Address]:
    """Return the addresses of `device_ip`, which may be a list with commas; leave out what is no address."""
    text = device.text("device_ip")
    return [] if text is None else [address for part in text.split(",") if (address := parse_address(part))]


def _read_all_addresses(survey: Survey) -> list[tuple[DeviceEntry, list[Address]]]:
    """Return every device that has a device_ip with its addresses; they are parsed once for all rules."""
    return survey.work_out_once(
        "device addresses",
        lambda: [(device, read_device_addresses(device)) for device in survey.devices if device.has("device_ip")],
    )


@rule("R13", "device_ip is the address of a network port", severity="error or warning", sources=_CONCISE)
def check_device_addresses(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """No mask, no mark of a failed tool, no 0.0.0.0, no loopback address (a warning on a single server)."""
    for device, addresses in _read_all_addresses(survey):
        text = device.text("device_ip")
        parts = [] if text is None else text.split(",")
        # What stands at the place of an address and is none is named; a list without such is not parsed again.
        known: list[Address | None] = [*addresses] if len(addresses) == len(parts) else [*map(parse_address, parts)]
        for part, address in zip(parts, known, strict=True):
            found = _fault_of(part, address, survey)
            if found is not None:
                severity, message = found
                remedy = _FIND_IT if profile.has_ports else "leave the key out: this kind of device has no such port"
                yield device.complain("device_ip", "R13", severity, message, remedy)
                break


def _fault_of(part: str, address: Address | None, survey: Survey) -> tuple[Severity, str] | None:
    if address is None:
        what = name_placeholder(part)
        fault = f"the address is {what}" if what else "the value is not an IPv4 or IPv6 address"
        return "error", fault if part.strip() else "the address is empty"
    if _is_usual(address):
        return None
    if address.is_unspecified or address.is_multicast or address == _BROADCAST:
        return "error", "the address cannot belong to a network port"
    if address.is_loopback:
        return "error" if survey.is_multi_server else "warning", "the address is a loopback address"
    return None


def _is_usual(address: Address) -> bool:
    """Whether an IPv4 address is in none of the ranges below: the usual case, told in a fraction of the time."""
    return address.version == 4 and 1 << 24 <= (number := int(address)) < 224 << 24 and number >> 24 != 127


@rule("R14", "device_ip is unique in the whole table", is_whole=True, sources=_CONCISE)
def check_device_addresses_unique(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """A backup address is another device's own address by design (R27), so it does not count here."""
    first_devices: dict[Address, DeviceEntry] = {}
    for device, addresses in _read_all_addresses(survey):
        for address in addresses:
            if address in first_devices:
                message = f"the same address stands at {first_devices[address].path_of('device_ip')}"
                yield device.complain("device_ip", "R14", "error", message, _FIND_IT)
                break
            first_devices[address] = device


@rule(
    "R15",
    "all device addresses are of one family and equal in number, and so are all host addresses",
    is_whole=True,
    sources=_CONCISE,
)
def check_address_families(survey: Survey, _profile: Profile) -> Iterator[Problem]:
    """The odd ones are reported, not the many."""
    with_address = [(device, addresses) for device, addresses in _read_all_addresses(survey) if addresses]
    family = _most_common(address.version for _, addresses in with_address for address in addresses)
    count = _most_common(len(addresses) for _, addresses in with_address)
    for device, addresses in with_address:
        if any(address.version != family for address in addresses):
            message = f"the other addresses are IPv{family}"
            yield device.complain("device_ip", "R15", "error", message, f"use IPv{family} for every device")
        elif len(addresses) != count:
            message = f"the device has {len(addresses)} addresses, the others have {count}"
            yield device.complain("device_ip", "R15", "error", message, "give every device as many addresses")
    yield from _check_host_addresses(survey)


def _check_host_addresses(survey: Survey) -> Iterator[Problem]:
    hosts = [
        (server, parse_address(server.text("host_ip") or "")) for server in survey.servers if server.has("host_ip")
    ]
    family = _most_common(address.version for _, address in hosts if address)
    for server, address in hosts:
        what = name_placeholder(server.text("host_ip") or "")
        if server.text("host_ip") is None:
            continue
        if address is None:
            message = f"the address is {what}" if what else "the value is not an IPv4 or IPv6 address"
            yield server.complain("host_ip", "R15", "error", message, "write the host's address, or leave the key out")
        elif address.version != family:
            message = f"the other host addresses are IPv{family}"
            yield server.complain("host_ip", "R15", "error", message, f"use IPv{family} for every host")


@rule(
    "R16",
    "device_ip is there where devices talk over their own ports",
    severity="error or warning",
    chips=("910a", "a2", "a3", "300i-duo"),
    sources=(citations.CONCISE, citations.A3_PAGE),
)
def check_device_addresses_present(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """On 910A and 300I Duo always; on A2 with several servers; on A3 with several servers that are not one super pod.

    A2 needs it on one server too when HCCL_INTRA_ROCE_ENABLE=1, which no table tells. On cpu and gpu: never asked for.
    """
    need = _find_need(survey, chip_of(survey, profile)) if profile.is_ascend else None
    if need is None:
        return
    severity, where = need
    if survey.kind.writes_empty_addresses:
        yield from _find_without_address(survey)
        return
    for device in survey.devices:
        if not device.has("device_ip"):
            message = f"the key is missing; HCCL needs it {where}"
            yield device.complain("device_ip", "R16", severity, message, _FIND_IT)


def _find_without_address(survey: Survey) -> Iterator[Problem]:
    """Template 2 may write "" for no address (a missing key is R28 too); servers cannot connect without one."""
    for device in survey.devices if survey.is_multi_server else ():
        if not device.has("device_ip"):
            message = (
                "the device has no address in a table of several servers; HCCL reads that, but cannot connect them"
            )
            yield device.complain("device_ip", "R16", "warning", message, _FIND_IT)


def _find_need(survey: Survey, chip: str | None) -> tuple[Severity, str] | None:
    if chip in ("910a", "300i-duo"):
        return "error", "on 910A and 300I Duo"
    if chip == "a5":
        return None
    if survey.is_multi_server:
        pods = {pod.text("super_pod_id") for pod in survey.super_pods}
        if chip == "a3" and len(pods) == 1:
            return None
        return "error", "between super pods" if chip == "a3" and pods else "in a table of several servers"
    return None if chip else ("warning", "on 910A and 300I Duo")


def _most_common(values: Iterator[_Value]) -> _Value | None:
    ranking = Counter(values).most_common(1)
    return ranking[0][0] if ranking else None


@rule(
    "R22",
    "ports are 1 to 65535, and host_port is unique on its server",
    severity="error or warning",
    sources=(citations.CONCISE, citations.A3_PAGE),
)
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


@rule(
    "R27",
    "backup_device_ip is the address of the other die of the same module, with another port",
    chips=("a3",),
    sources=(citations.CONCISE, citations.A3_PAGE),
)
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
                yield _complain_of_plan(device, message, "give the devices of one number addresses of one segment")
        if plane_of is not None:
            in_place = [entry for entry in placed if entry[2] == usual[entry[1]][0]]
            yield from _check_planes(in_place, plane_of, bits)


def _segments_of(server: ServerEntry, bits: int) -> Iterator[tuple[DeviceEntry, int, Segment]]:
    """A device with several addresses is placed by its first; one whose address is too short for `bits` not at all."""
    for device in server.devices:
        for address in read_device_addresses(device)[:1]:
            if device.device_id is not None and bits <= address.max_prefixlen:
                yield device, device.device_id, (address.version, int(address) >> (address.max_prefixlen - bits))


def _check_planes(
    placed: list[tuple[DeviceEntry, int, Segment]], plane_of: Callable[[int], int], bits: int
) -> Iterator[Problem]:
    usual: dict[int, tuple[Segment, int]] = {}
    for device, device_id, segment in placed:
        expected, first = usual.setdefault(plane_of(device_id), (segment, device_id))
        if segment != expected:
            message = f"device {device_id} is outside segment {_show(expected, bits)} of device {first} of its server"
            yield _complain_of_plan(device, message, "give the devices of one plane addresses of one segment")


def _show(segment: Segment, bits: int) -> str:
    version, prefix = segment
    if version == 4:
        return str(ipaddress.IPv4Network((prefix << (32 - bits), bits)))
    return str(ipaddress.IPv6Network((prefix << (128 - bits), bits)))


def _complain_of_plan(device: DeviceEntry, message: str, remedy: str) -> Problem:
    return device.complain("device_ip", "R23", "warning", message, remedy)
