"""Rules R13 to R16: the addresses of devices and hosts.

`device_ip` may be left out where the device has no network port of its own: always for the targets cpu and gpu, and
on Ascend inside one server. It is never to be made up: HCCL compares it with the address of the real port.
Source: HCCL's parser (EI0001, EI0014) and documentation, and the field reports behind the messages.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import TypeVar

from ranktable.placeholder import name_placeholder
from ranktable.problem import Problem, Severity
from ranktable.profile import Profile
from ranktable.rules.chips import chip_of
from ranktable.rules.registry import TEMPLATE2, rule
from ranktable.survey import DeviceEntry, Survey

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Value = TypeVar("_Value", bound=Hashable)

_FIND_IT = "write the address of the device's port: hccn_tool -i DEVICE_ID -ip -g, or address_N of /etc/hccn.conf"
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")


def parse_address(text: str) -> Address | None:
    """Return the IPv4 or IPv6 address in `text`, None when it is none."""
    try:
        # The system's parser takes the same IPv4 addresses as ipaddress does, in a fifth of the time.
        return ipaddress.IPv4Address(socket.inet_pton(socket.AF_INET, text))
    except (OSError, ValueError):
        pass
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


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


@rule("R13", "device_ip is the address of a network port", severity="error or warning")
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


@rule("R14", "device_ip is unique in the whole table", is_whole=True)
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


@rule("R15", "all device addresses are of one family and equal in number, and so are all host addresses", is_whole=True)
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
)
def check_device_addresses_present(survey: Survey, profile: Profile) -> Iterator[Problem]:
    """On 910A and 300I Duo always; on A2 with several servers; on A3 with several servers that are not one super pod.

    A2 needs it on one server too when HCCL_INTRA_ROCE_ENABLE=1, which no table tells. On cpu and gpu: never asked for.
    """
    need = _find_need(survey, chip_of(survey, profile)) if profile.is_ascend else None
    if need is None:
        return
    severity, where = need
    if survey.dialect in TEMPLATE2:
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
