"""Names and addresses of hosts, and how many slots one has."""

from __future__ import annotations

import ipaddress
import re

from ranktable.errors import HostListError
from ranktable.hosts.brackets import quote

MAX_NAME_CHARS = 253
"""Source: RFC 1035, section 2.3.4, without the last dot."""
MAX_SLOTS = 4096
LOOPBACK = "localhost"

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z"
_ZONE = r"[A-Za-z0-9_.-]+\Z"


def host_key(name: str) -> str:
    """Return one spelling for all spellings of a name or an address that a list shows to be the same."""
    address = address_of(name)
    if address is None:
        plain = name.lower().rstrip(".")
        return LOOPBACK if plain.partition(".")[0] == LOOPBACK else plain
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return LOOPBACK if address.is_loopback else str(mapped or address)


def check_host_name(name: str) -> None:
    """Refuse with HostListError what is no host name or address, above all what ssh or a shell reads otherwise."""
    if name.startswith("-"):
        raise HostListError(f"{quote(name)} starts with '-', as an option does", "give a host name")
    if len(name) > MAX_NAME_CHARS:
        raise HostListError(f"{quote(name)} has more than {MAX_NAME_CHARS} characters", "give a host name")
    is_mistyped = "." in name and not name.strip("0123456789.")  # 10.0.0 or 10.0.0.256
    if address_of(name) is None and (is_mistyped or not re.match(_NAME, name)):
        remedy = "letters, digits, '.', '-' and '_' only"
        raise HostListError(f"{quote(name)} is neither a host name nor an address", remedy)


def split_place(place: str) -> tuple[str, str | None]:
    """Return a host and what follows its colon, None without one.

    Two colons and no brackets are an IPv6 address alone. Raises HostListError: something else than a colon after
    `[address]`.
    """
    if place.startswith("["):
        name, bracket, rest = place[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise HostListError(f"{quote(place)} has more than a colon after its brackets", "write [address]:8")
        return name, rest[1:] if rest else None
    if place.count(":") > 1:
        return place, None
    name, colon, slots = place.partition(":")
    return name, slots if colon else None


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the numeric address in a text, with its zone; None when it is none."""
    if ":" not in text and not text[:1].isdigit():
        return None
    bare, percent, zone = text.partition("%")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return None
    if percent and (address.version == 4 or not re.match(_ZONE, zone)):
        return None
    return ipaddress.ip_address(text)
