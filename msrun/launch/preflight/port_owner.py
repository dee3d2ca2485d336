"""Who listens on a port of this host, as far as /proc shows it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from msrun.planning.masking import mask_words

LISTENING = "0A"
"""State TCP_LISTEN in /proc/net/tcp (proc(5), include/net/tcp_states.h)."""
MAX_COMMAND_CHARS = 80


def describe_port_owner(port: int, root: Path = Path("/proc")) -> str:
    """Return `pid 4711 (python serve.py)`, or an empty string when the owner is not visible, as another user's.

    Secrets in its command line are hidden.
    """
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port, root)}
    if wanted:
        for entry in sorted(root.glob("[0-9]*"), key=lambda path: int(path.name)):
            if wanted & set(_links(entry / "fd")):
                command = _command(entry)
                return f"pid {entry.name}{f' ({command})' if command else ''}"
    return ""


def _listening_inodes(port: int, root: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (root / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _links(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # the process has gone, or is another user's
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                yield str(os.readlink(entry))  # noqa: PTH115 - socket:[1] is no path


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode("utf-8", "backslashreplace").split("\0")
    except OSError:
        return ""
    text = " ".join(mask_words(words)).strip()
    return text if len(text) <= MAX_COMMAND_CHARS else text[:MAX_COMMAND_CHARS] + "..."
