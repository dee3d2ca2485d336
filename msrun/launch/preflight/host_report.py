"""What a host says of itself to the launcher before a job starts, and how that travels.

A report comes from another machine: whatever is in it is cut to size and made printable, and a field that is missing
or of another type is left empty, so that a host with another msrun is named by its version and not by a broken message.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from msrun import contract
from msrun.agent.processes.process_control import signal_name
from msrun.errors import ClusterError
from msrun.launch.preflight.finding import Finding
from msrun.planning.hosts.host_entry import HostEntry

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


MAX_STDERR_CHARS = 16_384
MAX_QUOTED_CHARS = 200
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit status of a shell whose command cannot be run, or is not there. Source: POSIX, Shell Command Language, 2.8.2."""

_OTHER = "name another Python by --python, or by python= in the hostfile"

_SIGNS = (
    (r"^msrun agent: (?P<what>.+)$", "{what}"),
    (r"No space left on device", "a disk there is full; make room, or set TMPDIR there to a folder on another one"),
    (r"Disk quota exceeded", "the user's disk quota there is used up; make room"),
    (r"error while loading shared libraries: (?P<what>[^:\s]+)", f"{{python}} lacks the library {{what}}; {_OTHER}"),
    (
        r"No module named '?encodings\b",
        f"{{python}} finds no library of its own; unset PYTHONHOME there, or {_OTHER}",
    ),
    (
        r"Error: No module named '?msrun\b(?!\.)",
        f"msrun is not installed for {{python}}; install it there, {_OTHER}, or send it along with --ship",
    ),
    (
        r"Error: No module named '?msrun\.|cannot import name .* from .*\bmsrun\b",
        "another version of msrun is installed for {python}; install this one there, or send it along with --ship",
    ),
    (
        r"future feature annotations|from 'typing'|keyword argument 'kw_only'|^TypeError: file\(\)|^SyntaxError: ",
        f"{{python}} is too old: msrun needs Python 3.11 or newer; {_OTHER}",
    ),
    (
        r"Error: No module named '?(?P<what>[\w.]+)",
        "{python} lacks the module {what}; install msrun there with all that it requires",
    ),
    (
        r"^MemoryError|Cannot allocate memory|std::bad_alloc",
        "there is not enough memory there; end what uses it, or raise the limit of the user or the container",
    ),
    (
        r"Resource temporarily unavailable|can't start new thread",
        "the user may not start more processes there; raise ulimit -u or the container's limit",
    ),
    (r"account is currently not available|nologin", "the user has no shell there; give another user by --ssh_user"),
    (r"login as the user \W*(?P<what>[\w.-]+)", "that user may not log in there; give --ssh_user {what}"),
    (r"password (?:has )?expired|change your password", "the user's password there has expired; log in once by hand"),
)
"""Text on stderr, and what it means; the first that is found counts."""


def explain_agent_end(exit_status: int, stderr_text: str, entry: HostEntry) -> ClusterError:
    """Return why an agent ended of which more was expected.

    Args:
        exit_status: of the agent or of the shell that was to start it; 128 + N for signal N.
        stderr_text: the last that it wrote to stderr.
    """
    python = entry.python or sys.executable
    stderr_text = stderr_text[-MAX_STDERR_CHARS:]
    what = _by_text(stderr_text, python) or _by_status(exit_status, stderr_text, python)
    return ClusterError(f"{entry.name}: {what}")


def _by_text(stderr_text: str, python: str) -> str:
    for pattern, text in _SIGNS:
        if match := re.search(pattern, stderr_text, re.MULTILINE):
            what = printable(match.groupdict().get("what") or "", MAX_QUOTED_CHARS)
            return text.format(python=python, what=what)
    return ""


def _by_status(exit_status: int, stderr_text: str, python: str) -> str:
    lines = [line for line in map(str.strip, stderr_text.splitlines()) if line]
    blaming = [line for line in lines if python in line and exit_status in (NOT_EXECUTABLE, NOT_FOUND)]
    last = printable([*blaming[:1], *lines[-1:]][0], MAX_QUOTED_CHARS) if lines else ""
    said = f": {last}" if last else ""
    if exit_status == NOT_FOUND:
        return f"there is no {python}{said}; install it there, or {_OTHER}"
    if exit_status == NOT_EXECUTABLE:
        kind = " (is it for another kind of processor?)" if "xec format error" in stderr_text else ""
        return f"{python} cannot be run{kind}{said}; {_OTHER}"
    if exit_status > contract.EXIT_SIGNAL_BASE:
        name = signal_name(exit_status - contract.EXIT_SIGNAL_BASE)
        why = "; somebody, or the kernel for want of memory, has ended it" if name == "SIGKILL" else ""
        return f"the agent was ended by {name}{why}{said}"
    if exit_status == contract.EXIT_OK and not last:
        return (
            "its login shell ended before it started the agent; look for exit or exec in its start-up files, such as "
            "~/.bashrc, and for a forced command in authorized_keys"
        )
    return f"the agent ended with exit code {exit_status}{said or ', and said nothing'}"
