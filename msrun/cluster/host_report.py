"""What a host of a job tells of itself: findings of --check, addresses, and how it went to reach another host."""

from __future__ import annotations

import ipaddress
from typing import Literal

from msrun import contract
from msrun.planning.record import Record


class Finding(Record):
    """One line of --check: about one host, some hosts of a job, or all of them together."""

    status: Literal["ok", "warn", "fail"]
    name: str
    text: str  # one line; for `fail` the error that a run would end with
    exit_code: int = contract.EXIT_OK
    nodes: tuple[int, ...] = ()  # of several hosts, those that it is said of; empty: the job as a whole

    def __post_init__(self) -> None:
        if self.status == "fail" and not 0 < self.exit_code < 256:
            raise ValueError(f"a failure with exit code {self.exit_code}")


class HostAddress(Record):
    """One numeric address of a host."""

    address: str
    interface: str
    prefix_bits: int  # length of its network's prefix; 0 = not known

    def __post_init__(self) -> None:
        ipaddress.ip_network(f"{self.address}/{self.prefix_bits}", strict=False)

    @property
    def is_routable(self) -> bool:
        """Whether another host could reach it: neither loopback nor of one link only."""
        address = ipaddress.ip_address(self.address)
        return not (address.is_loopback or address.is_link_local or address.is_unspecified)

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
        """The network that it is in; None when that is not known."""
        return ipaddress.ip_network(f"{self.address}/{self.prefix_bits}", strict=False) if self.prefix_bits else None


class HostReport(Record, kw_only=True):
    """One host as its agent sees it. Empty text: not known there."""

    host_name: str = ""
    python_version: str = ""
    msrun_version: str = ""
    torch_version: str = ""  # empty: not installed
    numpy_version: str = ""
    architecture: str = ""  # as the kernel calls it: x86_64, aarch64
    boot_id: str = ""  # of the running kernel; equal on what is one machine
    device_target: str = ""  # what the workers would use: cpu, gpu or ascend
    ssh_client: str = ""  # the launcher's address as sshd there saw it
    ssh_server: str = ""  # the host's own address in the same connection
    master_address: str = ""  # what the name of the scheduler's host stands for there, if that was asked
    received_at: float = 0.0  # the host's clock (s since the epoch) when it was asked
    made_at: float = 0.0  # the same when the report was made
    sees_log_dir: bool = False  # whether the launcher's log directory is on a file system that this host sees, too
    sources: tuple[tuple[str, str], ...] = ()  # name and SHA-256 of the program and of its own modules
    addresses: tuple[HostAddress, ...] = ()
    findings: tuple[Finding, ...] = ()  # what the checks of one host have found

    @property
    def routable(self) -> tuple[HostAddress, ...]:
        return tuple(entry for entry in self.addresses if entry.is_routable)


class ReachResult(Record):
    """How it went on one host."""

    error: str = ""  # why it cannot be reached: "refused", "timed out after 3 s", ...; empty: it can
    source: str = ""  # own address that the way there begins with; empty: there is no way
    interface: str = ""  # name of the network interface that has `source`
    is_own: bool = False  # the address belongs to the host that tried, so it came nowhere else
