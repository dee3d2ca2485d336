"""Logs as files: appended to, whatever the disk does, and kept from filling it: what is oldest is freed in place.

Whoever writes a log goes on writing the same file, and a place in it stays where it is: what was freed is a hole, which
takes no disk and reads as zeros. That needs a file system that knows holes, as ext4, XFS, Btrfs and tmpfs do, and NFS
from 4.2 on; on another one logs stay whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable

from msrun.agent.own_file import open_own_file
from msrun.planning.record import Record

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


class LogLimit(Record):
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
                    self._change(FREE, end)
                except OSError as error:
                    self._on_refused(error.strerror or type(error).__name__)
                    end = _REFUSED
                self._freed = end

    def end(self) -> None:
        """Nobody writes the file any more; its hole goes where it can be taken out. Another may have the name next."""
        freed, self._freed = self._freed, 0
        if 0 < freed < _REFUSED:
            with contextlib.suppress(OSError):
                self._change(_COLLAPSE_RANGE, freed)

    def _change(self, mode: int, end: int) -> None:
        descriptor = open_own_file(self._path, os.O_WRONLY)
        try:
            change(descriptor, mode, 0, end)
        finally:
            os.close(descriptor)


class LogFile:
    """A log that this process writes. Failures to write never leave this class: they are counted and told."""

    def __init__(self, path: str, limit: LogLimit | None = None) -> None:
        """Open the file, or create it, and go on at its end (OSError: it cannot be, or is no plain file of ours)."""
        self._bounded = BoundedLog(path, limit, lambda _: None) if limit else None
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
        if self._bounded is not None:
            self._bounded.look()

    def _lose(self, data: bytes) -> None:
        if data:
            self.lost_bytes += len(data)
            self._gap_bytes += len(data)
            self._is_gap_in_line = not data.endswith(b"\n")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._bounded is not None:
                self._bounded.end()
