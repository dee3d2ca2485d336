"""Memory that processes of one machine share: a memfd, which the others open through /proc.

It has no name, so that nothing can be left behind, needs no room in /dev/shm, and is readable by nobody who may not
look into this user's processes. Pages exist once they are written.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

_MAGIC = b"msrun shm 1\n"
_SECRET_BYTES = 16
HEAD_BYTES = 4096
"""At its beginning, by which it is recognised."""


def make_memory(size: int) -> tuple[int, list[Any]]:
    """Return the descriptor of new memory, and what `open_memory` needs to know; it is plain JSON."""
    secret = secrets.token_hex(_SECRET_BYTES)
    descriptor = os.memfd_create("msrun-shm", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, _MAGIC + secret.encode(), 0)
    return descriptor, [this_machine(), os.getpid(), descriptor, secret]


def open_memory(host: list[str], pid: int, descriptor: int, secret: str) -> int:
    """Return a descriptor of another process's memory.

    Raises:
        RuntimeError: it is on another machine, or may not be opened.
    """
    if host != this_machine():
        raise RuntimeError("it is on another machine")
    try:
        found = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(f"process {pid}: {error.strerror}") from error
    if os.pread(found, len(_MAGIC) + len(secret), 0) != _MAGIC + secret.encode():
        os.close(found)
        raise RuntimeError(f"process {pid} shares other memory than was said")
    return found


def this_machine() -> list[str]:
    """Return what tells this machine, and this view of its processes, from others."""
    return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(Path("/proc/self/ns/pid").readlink())]
