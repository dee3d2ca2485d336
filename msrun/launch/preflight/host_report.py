"""What a host says of itself to the launcher before a job starts, and how that travels.

A report comes from another machine: whatever is in it is cut to size and made printable, and a field that is missing
or of another type is left empty, so that a host with another msrun is named by its version and not by a broken message.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from dataclasses import dataclass
from typing import Any

from msrun import contract
from msrun.agent.processes.process_control import signal_name
from msrun.cluster.protocol import HostReport
from msrun.errors import ClusterError
from msrun.planning.hosts.host_entry import HostEntry

MAX_TEXT_CHARS = 400
MAX_ITEMS = 256


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


def printable_record(value: Any) -> Any:
    """Return what another host has sent with all text in it as `printable`, and lists cut to size."""
    if isinstance(value, dict):
        return {key: printable_record(item) for key, item in value.items()}
    if isinstance(value, list):
        return [printable_record(item) for item in value[:MAX_ITEMS]]
    return printable(value) if isinstance(value, str) else value


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
