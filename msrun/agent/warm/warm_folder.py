"""The folder of a user's warm servers: a socket, a lock and a log for each."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from msrun.errors import UsageError


def warm_folder(caller: Mapping[str, str]) -> Path:
    """Return the folder, made where it was not there: below XDG_RUNTIME_DIR, else in the temporary folder.

    Raises:
        UsageError: it belongs to another user, or others may look into it.
    """
    runtime = caller.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"msrun-warm-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(f"--warm: {folder} is not a folder that only you can open; remove it, or set XDG_RUNTIME_DIR")
    return folder


def importing(socket_path: Path) -> Path:
    """Return the name of a warm server's socket until the server has imported."""
    return socket_path.with_suffix(".new")


@contextlib.contextmanager
def address(socket_path: Path) -> Iterator[str]:
    """Give a name to bind or connect to: the path itself may be longer than the 107 bytes that unix(7) takes."""
    folder = os.open(socket_path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{socket_path.name}"
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(socket_path: Path, *, waits: bool) -> Iterator[bool]:
    """Hold the lock of one warm server; gives whether it is held, which without waiting it may not be."""
    descriptor = os.open(socket_path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        yield False
        return
    try:
        yield True
    finally:
        os.close(descriptor)
