"""Files of the log directory: only plain ones are opened, written only where they are ours, and never waited for; and
logs, appended to whatever the disk does, and kept from filling it: what is oldest is freed in place.

Others may be able to write into the directory. A FIFO, a device, a link or a file of somebody else in the place of a
log is not opened; `create_own_file` puts a new file there.

Whoever writes a log goes on writing the same file, and a place in it stays where it is: what was freed is a hole, which
takes no disk and reads as zeros. That needs a file system that knows holes, as ext4, XFS, Btrfs and tmpfs do, and NFS
from 4.2 on; on another one logs stay whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


def read_end(path: str | os.PathLike[str], num_bytes: int) -> bytes:
    """Return the last bytes of a file of ours; empty when it is not there, or something else is in its place."""
    try:
        with os.fdopen(open_own_file(path, os.O_RDONLY), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            return file.read(num_bytes)
    except OSError:
        return b""


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


RETRY_S = 1.0  # how long a log that could not be written is left alone; an attempt on a full disk can take its time
FREE, _COLLAPSE_RANGE = 0x01 | 0x02, 0x08  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of <linux/falloc.h>
_BLOCK_BYTES = 4096  # what file systems free
_REFUSED = 1 << 62


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def change(descriptor: int, mode: int, begin: int, end: int) -> None:
    """Free bytes of a file, or take them out; `mode` as of fallocate(2) (OSError: its file system cannot do that)."""
    offset, length = ctypes.c_int64(begin), ctypes.c_int64(end - begin)
    if _libc().fallocate64(descriptor, mode, offset, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def find_data(descriptor: int, place: int) -> int:
    """Return where the first byte from a place on is that was not freed; the place itself where none was."""
    with contextlib.suppress(OSError):  # nothing is behind it
        return os.lseek(descriptor, place, os.SEEK_DATA)
    return place


@dataclass(frozen=True)
class LogLimit:
    """How much of each log stays: the newest `keep` to `keep` + 1 times `max_bytes`."""

    max_bytes: int  # so much is freed at a time
    keep: int  # 1 or more


class BoundedLog:
    """One log that somebody writes."""

    def __init__(self, path: str, limit: LogLimit, on_refused: Callable[[str], None]) -> None:
        """`on_refused`: told once, in the system's words, that the log stays whole."""
        self._path, self._limit, self._on_refused = path, limit, on_refused
        self._freed = 0

    def look(self) -> None:
        """Free what is too old; for a log of which new bytes may have come."""
        with contextlib.suppress(FileNotFoundError):
            size = os.stat(self._path).st_size  # noqa: PTH116 - many times a second
            end = (size // self._limit.max_bytes - self._limit.keep) * self._limit.max_bytes
            end -= end % _BLOCK_BYTES
            if self._freed < end:
                try:
                    self._change(self._path, FREE, end)
                except OSError as error:
                    self._on_refused(error.strerror or type(error).__name__)
                    end = _REFUSED
                self._freed = end

    def end(self, attempt: int | None = None) -> None:
        """Nobody writes the log any more, which has an attempt's name now; the hole goes where it can be taken out."""
        freed, self._freed = self._freed, 0
        if 0 < freed < _REFUSED:
            path = self._path if attempt is None else contract.attempt_log_name(self._path, attempt)
            with contextlib.suppress(OSError):
                self._change(path, _COLLAPSE_RANGE, freed)

    def _change(self, path: str, mode: int, end: int) -> None:
        descriptor = open_own_file(path, os.O_WRONLY)
        try:
            change(descriptor, mode, 0, end)
        finally:
            os.close(descriptor)


class LogFile:
    """A log that this process writes. Failures to write never leave this class: they are counted and told."""

    def __init__(self, path: str) -> None:
        """Open the file, or create it, and go on at its end (OSError: it cannot be, or is no plain file of ours)."""
        self._descriptor = open_own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._gap_bytes = 0  # bytes lost since the file was last written; 0 when all is well
        self._is_gap_in_line = False  # the last lost byte was within a line
        self._retry_at = 0.0
        self.lost_bytes = 0  # bytes that could not be written, in all
        self.fault = ""  # why something was first lost; empty when nothing was

    def write(self, data: bytes) -> None:
        """Append bytes; those that cannot be written are lost, and told before the next line that can."""
        note = b""
        if self._gap_bytes:
            begin = data.find(b"\n") + 1 if self._is_gap_in_line else 0
            if time.monotonic() < self._retry_at or (self._is_gap_in_line and not begin):
                begin = len(data)
            self._lose(data[:begin])
            data = data[begin:]
            if not data:
                return
            note = f"\n[msrun: {self._gap_bytes} bytes of this log were lost: {self.fault}]\n".encode()
        text, written = note + data, 0
        try:
            while written < len(text):
                written += os.write(self._descriptor, text[written:])
        except OSError as error:
            self.fault = self.fault or error.strerror or type(error).__name__
            self._retry_at = time.monotonic() + RETRY_S
        if written >= len(note):
            self._gap_bytes = 0
        self._lose(data[max(0, written - len(note)) :])

    def _lose(self, data: bytes) -> None:
        if data:
            self.lost_bytes += len(data)
            self._gap_bytes += len(data)
            self._is_gap_in_line = not data.endswith(b"\n")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
