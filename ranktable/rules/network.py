"""Rule R23: the network segments that the device addresses form. Off unless a prefix length is given.

A rank table has no netmasks, so the prefix length must come from the user. Source: the network plans of the deployment
guides: on a 910A devices i and i+4 share a segment, on A2 all devices of a server do; and in every plan the devices
of one number share a segment over the servers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator

from ranktable.problem import Problem
from ranktable.profile import Profile
from ranktable.rules.addresses import read_device_addresses
from ranktable.rules.chips import chip_of
from ranktable.rules.registry import rule
from ranktable.survey import DeviceEntry, ServerEntry, Survey

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
