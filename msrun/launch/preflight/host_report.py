"""What a host says of itself to the launcher before a job starts, and how that travels.

A report comes from another machine: whatever is in it is cut to size and made printable, and a field that is missing
or of another type is left empty, so that a host with another msrun is named by its version and not by a broken message.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from msrun import contract
from msrun.errors import ClusterError
from msrun.launch.preflight.finding import Finding

MAX_TEXT_CHARS = 400
MAX_NAME_CHARS = 64
MAX_FINDINGS = 64
MAX_ADDRESSES = 64
MAX_SOURCES = 256
MAX_SECONDS = 1e12
_STATUSES: Mapping[object, Literal["ok", "warn", "fail"]] = {"ok": "ok", "warn": "warn", "fail": "fail"}
_EXIT_CODES = (contract.EXIT_USAGE, contract.EXIT_CLUSTER)


@dataclass(frozen=True)
class HostAddress:
    """One numeric address of a host."""

    address: str
    interface: str
    prefix_bits: int
    """Length of its network's prefix; 0 = not known."""

    @property
    def is_routable(self) -> bool:
        """Whether another host could reach it: neither loopback nor of one link only."""
        address = ipaddress.ip_address(self.address)
        return not (address.is_loopback or address.is_link_local or address.is_unspecified)

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
        """The network that it is in; None when that is not known."""
        return ipaddress.ip_network(f"{self.address}/{self.prefix_bits}", strict=False) if self.prefix_bits else None


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """One host as its agent sees it. Empty text: not known there."""

    host_name: str = ""
    python_version: str = ""
    python_path: str = ""
    msrun_version: str = ""
    torch_version: str = ""
    """Empty: not installed."""
    numpy_version: str = ""
    architecture: str = ""
    """As the kernel calls it: x86_64, aarch64."""
    boot_id: str = ""
    """Of the running kernel; equal on what is one machine."""
    device_target: str = ""
    """What the workers would use: cpu, gpu or ascend."""
    ssh_client: str = ""
    """The launcher's address as sshd there saw it."""
    ssh_server: str = ""
    """The host's own address in the same connection."""
    master_address: str = ""
    """What the name of the scheduler's host stands for there, if that was asked."""
    received_at: float = 0.0
    """The host's clock (s since the epoch) when it was asked."""
    made_at: float = 0.0
    """The same when the report was made."""
    sees_log_dir: bool = False
    """Whether the launcher's log directory is on a file system that this host sees, too."""
    sources: tuple[tuple[str, str], ...] = ()
    """Name and SHA-256 of the program, then of the modules beside it that it imports."""
    addresses: tuple[HostAddress, ...] = ()
    findings: tuple[Finding, ...] = ()
    """What the checks of one host have found."""

    @property
    def routable(self) -> tuple[HostAddress, ...]:
        """The addresses that another host could reach."""
        return tuple(entry for entry in self.addresses if entry.is_routable)

    @classmethod
    def from_json(cls, value: object) -> HostReport:
        """Return the report in a message, as far as it holds one.

        Raises:
            ClusterError: it is no JSON object.
        """
        if not isinstance(value, Mapping):
            raise ClusterError("its report cannot be read; install the same msrun on all hosts")
        texts = {field.name: _text(value.get(field.name)) for field in fields(cls) if field.type == "str"}
        return cls(
            **texts,
            received_at=_seconds(value.get("received_at")),
            made_at=_seconds(value.get("made_at")),
            sees_log_dir=value.get("sees_log_dir") is True,
            sources=tuple(_read_sources(value.get("sources"))),
            addresses=tuple(_read_addresses(value.get("addresses"))),
            findings=tuple(_read_findings(value.get("findings"))),
        )


@dataclass(frozen=True)
class HostAnswer:
    """A report, and when the launcher asked for it and got it."""

    report: HostReport
    sent_at: float
    """The launcher's clock (s since the epoch) when it asked."""
    received_at: float
    """The same when the report had come."""
    reached_as: str = ""
    """Numeric address by which the launcher reached the host; empty when that is not known."""


def is_numeric(address: str) -> bool:
    """Return whether this is an address and no name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def printable(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return text of another host on one line, without what would command a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])[:limit]


def _text(value: object, limit: int = MAX_TEXT_CHARS) -> str:
    return printable(value, limit) if isinstance(value, str) else ""


def _seconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_SECONDS:  # nan is not less
        return float(value)
    return 0.0


def _items(value: object, limit: int) -> list[Any]:
    return list(value[:limit]) if isinstance(value, list | tuple) else []


def _read_sources(value: object) -> list[tuple[str, str]]:
    pairs = [item for item in _items(value, MAX_SOURCES) if isinstance(item, list | tuple) and len(item) == 2]
    return [(_text(name), _text(digest, MAX_NAME_CHARS)) for name, digest in pairs]


def _read_addresses(value: object) -> list[HostAddress]:
    found = []
    for item in _items(value, MAX_ADDRESSES):
        if not isinstance(item, Mapping) or not is_numeric(_text(item.get("address"))):
            continue
        address = _text(item["address"])
        given, longest = item.get("prefix_bits"), ipaddress.ip_address(address).max_prefixlen
        bits = given if isinstance(given, int) and 0 <= given <= longest else 0
        found.append(HostAddress(address, _text(item.get("interface"), MAX_NAME_CHARS), int(bits)))
    return found


def _read_findings(value: object) -> list[Finding]:
    found = []
    for item in _items(value, MAX_FINDINGS):
        if not isinstance(item, Mapping) or item.get("status") not in ("ok", "warn", "fail"):
            continue
        status = _STATUSES[item["status"]]
        code = item.get("exit_code")
        exit_code = contract.EXIT_OK if status != "fail" else code if code in _EXIT_CODES else contract.EXIT_CLUSTER
        found.append(Finding(status, _text(item.get("name"), MAX_NAME_CHARS), _text(item.get("text")), exit_code))
    return found
