"""Addresses of this host: what a name stands for, which are ours, which interface has one."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from msrun.errors import ClusterError, UsageError


class UnresolvedName(ClusterError):
    """A host name that nobody knows, or not yet: in a cluster it may come up together with its host."""


def resolve_address(name: str) -> str:
    """Return the numeric address of the scheduler's host; a numeric one comes back as it is.

    Raises:
        UnresolvedName: nothing of that name is known now.
        UsageError: this host takes it for its own loopback address.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise UnresolvedName(
            f"--master_addr {name}: cannot be resolved ({reason}); give an address, or a name that this host knows"
        ) from None
    address = str(found[0][4][0]).partition("%")[0]
    if ipaddress.ip_address(address).is_loopback:  # many systems have their own name in /etc/hosts as 127.0.1.1
        raise UsageError(
            f"--master_addr {name}: is {address} on this host, which no other can reach; give the address itself"
        )
    return address


def own_addresses() -> Mapping[str, str]:
    """Return numeric address -> name of the network interface, of all interfaces of this host."""
    import psutil

    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
