"""Which of several hosts is this one: by an address, else by a name."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Sequence

from ranktable.hosts.names import address_of


def find_this_host(hosts: Sequence[Collection[str]], name: str, addresses: Iterable[str]) -> list[int]:
    """Return the places of the hosts, names and addresses of each, that are this one: one, when all is well.

    It has a `name`, with or without its domain, and numeric `addresses`; loopback is one only where it is among them.
    """
    own = {_plain(address) for address in addresses}
    found = [place for place, words in enumerate(hosts) if own & {_plain(word) for word in words if address_of(word)}]
    return found or [place for place, words in enumerate(hosts) if any(_is_called(word, name) for word in words)]


def _plain(text: str) -> str:
    """Return an address in its one form, without a zone."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _is_called(word: str, name: str) -> bool:
    """A domain is compared only where both have one."""
    if address_of(word) is not None:
        return False
    one, other = word.lower().rstrip("."), name.lower().rstrip(".")
    if "." in one and "." in other:
        return one == other
    return one.partition(".")[0] == other.partition(".")[0]
