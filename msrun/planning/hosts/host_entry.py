"""HostEntry: what a host list says of one host. Its names are checked: no ssh and no shell can read them wrong."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from msrun.errors import UsageError
from msrun.planning.hosts.brackets import shorten

MAX_NAME_CHARS = 253
"""Source: RFC 1035, section 2.3.4, without the last dot."""
MAX_PORT = 65535
MAX_SLOTS = 4096
LOOPBACK = "localhost"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")
_ZONE = re.compile(r"[A-Za-z0-9_.-]+\Z")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*\Z")
_PATH = re.compile(r"/[^\x00-\x1f\x7f]*\Z")


@dataclass(frozen=True)
class HostEntry:
    """One host of a job that is started from here."""

    name: str
    """As the user wrote it: a name of ssh_config, a host name or an address."""
    slots: int = 0
    """Workers there; 0 only while a list is read: it says nothing of them."""
    device_ids: tuple[int, ...] = ()
    """Of its workers, one each."""
    user: str = ""
    """Empty = that of ssh_config, else the launcher's user."""
    port: int = 0
    """0 = that of ssh_config, else 22."""
    python: str = ""
    """Absolute path of the interpreter there; empty = the launcher's own path."""
    address: str = ""
    """Its numeric address for the other hosts; empty = found out."""
    source: str = ""
    """Where it was named, for errors: "--hosts", "hosts.txt, line 3"."""
    is_rehearsed: bool = False
    """An agent on this machine stands for it, at an address of loopback."""

    @property
    def keys(self) -> set[str]:
        """What different spellings of this host have in common: case, the form of an address, all of loopback."""
        return {host_key(self.name), *([host_key(self.address)] if self.address else [])}

    @property
    def known_address(self) -> str:
        """Its address for the other hosts as far as the list tells it; empty for a name, and for loopback."""
        if self.address:
            return self.address
        address = _address(self.name)
        return str(address) if address is not None and not address.is_loopback else ""


def host_key(name: str) -> str:
    """Return one spelling for all spellings of a name or an address that a list shows to be the same."""
    address = _address(name)
    if address is None:
        plain = name.lower().rstrip(".")
        return LOOPBACK if plain.partition(".")[0] == LOOPBACK else plain
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return LOOPBACK if address.is_loopback else str(mapped or address)


def is_address(text: str) -> bool:
    """Return whether a text is a numeric address."""
    return _address(text) is not None


def check_host_name(name: str, source: str) -> None:
    """Refuse what is no host name and no address, above all what an ssh or a shell would read as something else.

    Raises:
        UsageError: naming source, value and what is allowed.
    """
    if name.startswith("-"):
        raise UsageError(f"{source}: {shorten(name)!r} starts with '-', as an option does; give a host name")
    if len(name) > MAX_NAME_CHARS:
        raise UsageError(f"{source}: {shorten(name)!r} has more than {MAX_NAME_CHARS} characters; give a host name")
    if _address(name) is None and (not _NAME.match(name) or _looks_like_address(name)):
        raise UsageError(
            f"{source}: {shorten(name)!r} is neither a host name nor an address; letters, digits, '.', '-' and '_' only"
        )


def check_user(user: str, source: str) -> None:
    """Refuse what is no user name.

    Raises:
        UsageError: naming source, value and what is allowed.
    """
    if not _USER.match(user):
        raise UsageError(f"{source}: user {shorten(user)!r}: letters, digits, '_', '.', '+', '@' and '-' only")


def check_python(path: str, source: str) -> None:
    """Refuse a path of an interpreter that is not absolute: no shell looks it up on the host.

    Raises:
        UsageError: naming source, value and what is allowed.
    """
    if not _PATH.match(path):
        raise UsageError(f"{source}: python {shorten(path)!r}: give the absolute path of a Python on the host")


def check_address(address: str, source: str) -> None:
    """Refuse what is no numeric address by which other hosts can reach this one.

    Raises:
        UsageError: naming source, value and what is allowed.
    """
    number = _address(address)
    if number is None or number.is_loopback or number.is_unspecified or number.is_multicast:
        raise UsageError(
            f"{source}: address {shorten(address)!r}: give the numeric address by which other hosts reach it, such as "
            "10.0.0.1"
        )


def parse_slots(text: str, source: str) -> int:
    """Turn the number of workers of a host into a number.

    Raises:
        UsageError: not 1 to `MAX_SLOTS`.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_SLOTS)) and 0 < int(text) <= MAX_SLOTS):
        raise UsageError(f"{source}: slots {shorten(text)!r}: must be a number from 1 to {MAX_SLOTS}")
    return int(text)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if ":" not in text and not text[:1].isdigit():
        return None
    bare, percent, zone = text.partition("%")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return None
    if percent and (address.version == 4 or not _ZONE.match(zone)):
        return None
    return ipaddress.ip_address(text)


def _looks_like_address(name: str) -> bool:
    """Digits and dots that are no address, such as 10.0.0 or 10.0.0.256, are one mistyped."""
    return bool(re.fullmatch(r"[0-9.]+", name)) and "." in name
