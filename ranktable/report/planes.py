"""Network planes: which devices of the servers share a network segment, as far as the addresses tell.

A table has no netmasks. The addresses of one device number over all servers span a network, at most /24 (IPv4) or /64
(IPv6); device numbers whose networks overlap are one plane. Source: the network plans of the 910A (devices i and i+4
share a segment), of the A2 (all share one), and of clusters that give each device number a segment of its own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from ranktable.model import RankTable
from ranktable.rules.addresses import Address, parse_address

_LONGEST_PREFIX = {4: 24, 6: 64}


@dataclass(frozen=True, slots=True)
class Plane:
    """Device numbers that share a network, and that network."""

    device_ids: tuple[int, ...]
    network: str


def find_planes(table: RankTable) -> tuple[Plane, ...]:
    """Return the planes of a table by their lowest device number; none when no device has an address."""
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for _, device in table.placements:
        address = _first_address(device.device_ip)
        if address is not None:
            key, number = (address.version, device.device_id), int(address)
            low, high = spans.get(key, (number, number))
            spans[key] = min(low, number), max(high, number)
    networks = sorted((_enclose(version, *span), device_id) for (version, device_id), span in spans.items())
    return tuple(sorted(_merge(networks), key=lambda plane: plane.device_ids))


def _first_address(text: str | None) -> Address | None:
    return parse_address(text.partition(",")[0].strip()) if text else None


_Network = tuple[int, int, int]
"""IP version, first address, prefix length: a network sorts before those within it."""


def _enclose(version: int, low: int, high: int) -> _Network:
    bits = 32 if version == 4 else 128
    prefix = min(_LONGEST_PREFIX[version], bits - (low ^ high).bit_length())
    return version, low >> (bits - prefix) << (bits - prefix), prefix


def _merge(networks: Iterable[tuple[_Network, int]]) -> list[Plane]:
    """Put networks that overlap together; of two that do, one lies within the other."""
    planes: list[tuple[_Network, list[int]]] = []
    for network, device_id in networks:
        if planes and _contains(planes[-1][0], network):
            planes[-1][1].append(device_id)
        else:
            planes.append((network, [device_id]))
    return [Plane(tuple(sorted(device_ids)), _write(network)) for network, device_ids in planes]


def _contains(outer: _Network, inner: _Network) -> bool:
    bits = 32 if outer[0] == 4 else 128
    return outer[0] == inner[0] and inner[1] >> (bits - outer[2]) == outer[1] >> (bits - outer[2])


def _write(network: _Network) -> str:
    version, first, prefix = network
    address = ipaddress.IPv4Address(first) if version == 4 else ipaddress.IPv6Address(first)
    return f"{address}/{prefix}"
