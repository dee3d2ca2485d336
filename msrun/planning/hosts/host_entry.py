"""HostEntry: what a host list says of one host. Its names are checked: no ssh and no shell can read them wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from msrun.errors import UsageError
from ranktable.errors import HostListError
from ranktable.hostlist.brackets import shorten
from ranktable.hostlist.host_name import MAX_SLOTS, address_of, host_key, slots_of


@contextmanager
def blamed_on(source: str) -> Iterator[None]:
    """Turn an error of the grammar, `ranktable.hostlist`, into a UsageError that names the source."""
    try:
        yield
    except HostListError as error:
        raise UsageError(f"{source}: {error.fault}; {error.remedy}") from None


MAX_PORT = 65535

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
    has_come: bool = False
    """msrun was started there, and has come to the scheduler's host; nothing is to be reached."""
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
        address = address_of(self.name)
        return str(address) if address is not None and not address.is_loopback else ""


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
    number = address_of(address)
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
    slots = slots_of(text)
    if not slots:
        raise UsageError(f"{source}: slots {shorten(text)!r}: must be a number from 1 to {MAX_SLOTS}")
    return slots
