"""Finds the addresses of host names with this host's resolver: several at a time, since one may take seconds."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from ranktable.errors import SourceError
from ranktable.rules.addresses import Address, parse_address

_AT_ONCE = 32


def resolve_names(names: Iterable[str]) -> dict[str, str]:
    """Return the address of each name, IPv4 where it has one; an address stands for itself.

    A loopback address is refused when there is more than one name: no other host reaches it. Raises SourceError.
    """
    listed = list(dict.fromkeys(names))
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(listed)))) as pool:
        addresses = list(pool.map(_resolve, listed))
    for name, address in zip(listed, addresses, strict=True):
        if address.is_loopback and len(listed) > 1:
            message = f"the name stands for {address}, which no other host reaches"
            raise SourceError(name, None, message, "correct /etc/hosts, or give the address of the host")
    return {name: str(address) for name, address in zip(listed, addresses, strict=True)}


def _resolve(name: str) -> Address:
    address = parse_address(name)
    if address is not None:
        return address
    try:
        answers = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the name cannot be resolved: {reason.lower()}"
        raise SourceError(name, None, message, "check the name, or leave --resolve out") from error
    found = [address for answer in answers if (address := parse_address(str(answer[4][0]))) is not None]
    if not found:
        raise SourceError(name, None, "the name has no address", "check the name, or leave --resolve out")
    return min(found, key=lambda address: address.version)
