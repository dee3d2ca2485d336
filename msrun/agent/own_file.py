"""How files of the log directory are opened: only plain files, written only where they are ours, and never waiting.

Others may be able to write into the directory. A FIFO, a device, a link or a file of somebody else in the place of a
log is not opened; `create_own_file` puts a new file there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from msrun import contract

_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NOT_PLAIN = "not a plain file"
_NO_PLAIN_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV})
"""What open(2) says of a link, of a FIFO without a reader, of a socket, of a directory and of a device."""


def open_own_file(path: str | os.PathLike[str], flags: int) -> int:
    """Return a descriptor of a plain file. `flags`: of open(2), beside those that make it safe. To be written, a file
    has to be the user's own, or the owner's of the folder, who could put any file there, and may have no second name.
    Raises OSError: it cannot be opened, or is no such file."""
    try:
        descriptor = os.open(path, flags | _SAFELY, contract.FILE_MODE)
    except OSError as error:
        if error.errno in _NO_PLAIN_FILE:
            raise OSError(error.errno, NOT_PLAIN, os.fspath(path)) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, NOT_PLAIN, os.fspath(path))
        if flags & os.O_ACCMODE != os.O_RDONLY:
            _check_owner(found, path)
        os.set_blocking(descriptor, True)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_from(path: str | os.PathLike[str], begin: int, num_bytes: int) -> bytes:
    """Return bytes of a file of ours from a place on, before its end where that is negative; empty when it is not
    there, or something else is in its place."""
    with contextlib.suppress(OSError), os.fdopen(open_own_file(path, os.O_RDONLY), "rb") as file:
        file.seek(begin if begin >= 0 else max(0, os.fstat(file.fileno()).st_size + begin))
        return file.read(num_bytes)
    return b""


def read_end(path: str | os.PathLike[str], num_bytes: int) -> bytes:
    return read_from(path, -num_bytes, num_bytes)


def append_text(path: str | os.PathLike[str], text: str, flags: int = 0) -> bool:
    """Append text to a file of ours; False when it cannot be written. `flags`: further ones of open(2)."""
    with contextlib.suppress(OSError):
        with os.fdopen(open_own_file(path, os.O_WRONLY | os.O_APPEND | flags), "ab") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
        return True
    return False


def text_of(path: str | os.PathLike[str]) -> str:
    """Return the text of a file that is not ours, such as one of the kernel's; empty where it says nothing."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    return ""


def _check_owner(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    # On some network file systems what root, or anybody, makes belongs to another user, folder and file alike.
    if found.st_uid not in (os.geteuid(), os.stat(os.path.dirname(path) or ".").st_uid):  # noqa: PTH116, PTH120
        raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}", os.fspath(path))
    if found.st_nlink > 1:
        raise OSError(errno.EPERM, "it has a second name, a hard link", os.fspath(path))


def create_own_file(path: str | os.PathLike[str]) -> int:
    """Return a descriptor, for appending, of an empty file with mode 0600. A plain file of the user's is emptied; what
    else stands there is removed first. A link is not followed: in a shared folder it could point at another user's
    file. Raises OSError: it cannot be made; a folder is in its place, or somebody else's file that may not be
    removed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return open_own_file(path, flags | os.O_EXCL)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1:
        descriptor = open_own_file(path, flags)
        os.ftruncate(descriptor, 0)
        os.fchmod(descriptor, contract.FILE_MODE)
        return descriptor
    os.unlink(path)  # noqa: PTH108
    return open_own_file(path, flags | os.O_EXCL)


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Yield a name of a socket that fits into its address of 108 bytes (unix(7)), however deep its folder is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
