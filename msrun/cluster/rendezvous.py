"""Where the workers of a job meet: a FileStore on one host, and a live TCPStore for plain torch scripts.

torch's own TCPStore server listens on every interface. Here it is handed a socket that is already bound to the
address of the job, so a one-host job is not reachable from outside. Connections made before the server runs wait in
the socket's backlog: no worker can come too early.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msrun.errors import ClusterError, UsageError
from msrun.planning.spec import is_loopback

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


class UnresolvedName(ClusterError):
    """A host name that nobody knows, or not yet: in a cluster it may come up together with its host."""


def resolve_address(name: str) -> str:
    """Return the numeric address of the scheduler's host; a numeric one comes back as it is. Raises UnresolvedName:
    nothing of that name is known now. Raises UsageError: this host takes it for its own loopback address.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        raise UnresolvedName(
            f"--master_addr {name}: cannot be resolved ({reason}); give an address, or a name that this host knows"
        ) from None
    address = str(found[0][4][0]).partition("%")[0]
    # Many systems have their own name in /etc/hosts as 127.0.1.1.
    if ipaddress.ip_address(address).is_loopback and not is_loopback(name):
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


BACKLOG = 4096
_NEIGHBOUR_TRIES = 20


def listen(address: str, port: int, remedy: str = "leave it out to take a free port") -> socket.socket:
    """Return a listening socket on `address`, IPv4 or IPv6; port 0 takes a free one, where possible before another.
    `remedy`: what the user can do when the port is taken. Raises UsageError: the port is in use or not allowed.
    """
    try:
        listener = _bound(address, port)
        for _ in range(_NEIGHBOUR_TRIES if port == 0 else 0):
            try:
                _bound(address, listener.getsockname()[1] + 1).close()  # for MindSpore's scheduler, if there is one
                break
            except (OSError, OverflowError):
                listener.close()
                listener = _bound(address, port)
        listener.listen(BACKLOG)
    except OSError as error:
        raise UsageError(
            f"--master_port {port}: cannot listen on {address}:{port} ({error.strerror}); {remedy}"
        ) from None
    return listener


def _bound(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except BaseException:
        listener.close()
        raise
    return listener


def forget_waiting(listener: socket.socket) -> None:
    """Close the connections that wait at a listening socket: whoever tried whether it can be reached is no client."""
    listener.settimeout(0.0)
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while True:
            listener.accept()[0].close()
    listener.settimeout(None)


def serve_tcp_store(listener: socket.socket) -> TCPStore:
    """Start torch's store on a socket that listens already; it lives as long as the returned object.

    The libuv server of torch cannot take over a socket (torch 2.11 to 2.13), the older one can.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = listener.getsockname()[:2]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=False
    )
