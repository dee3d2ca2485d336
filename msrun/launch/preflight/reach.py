"""Can this host reach an address and port, and over which interface? So that a firewall or a wrong network is named."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from msrun.cluster.addresses import own_addresses
from msrun.launch.preflight.host_report import is_numeric, printable

REACH_S = 3.0


@dataclass(frozen=True)
class ReachResult:
    """How it went on one host."""

    error: str = ""
    """Why it cannot be reached: "refused", "timed out after 3 s", ...; empty: it can."""
    source: str = ""
    """Own address that the way there begins with; empty: there is no way."""
    interface: str = ""
    """Name of the network interface that has `source`."""
    is_own: bool = False
    """The address belongs to the host that tried, so it came nowhere else."""

    @classmethod
    def from_json(cls, value: object) -> ReachResult:
        """Return the result in a message; what is no result is a failure."""
        if not isinstance(value, Mapping) or not isinstance(value.get("error"), str):
            return cls(error="its answer cannot be read")
        texts = {name: printable(str(value.get(name, ""))) for name in ("error", "source", "interface")}
        return cls(**texts, is_own=value.get("is_own") is True)


def try_reach(address: str, port: int, time_out_s: float = REACH_S) -> ReachResult:
    """Connect by TCP and close again; waits `time_out_s` at most, raises nothing.

    Args:
        address: numeric, so that no name server is waited for.
    """
    if not is_numeric(address):
        return ReachResult(error=f"{address!r} is no address")
    source = _source_address(address)
    owned = own_addresses()
    way = {"source": source, "interface": owned.get(source, ""), "is_own": address in owned}
    try:
        with contextlib.closing(socket.create_connection((address, port), time_out_s)):
            return ReachResult(**way)  # type: ignore[arg-type]
    except OSError as error:
        return ReachResult(error=_reason(error, time_out_s), **way)  # type: ignore[arg-type]


def _source_address(address: str) -> str:
    """Return the own address that the kernel's routes choose; nothing is sent."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _reason(error: OSError, time_out_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"timed out after {time_out_s:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if error.errno == errno.EINVAL:  # what Linux says of a route of type blackhole
        return "the route there is a blackhole"
    return (error.strerror or str(error)).lower()
