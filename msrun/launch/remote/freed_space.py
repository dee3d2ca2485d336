"""FreedSpace: the disk that a log on this host takes no more, because the launcher has that part of it."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

from msrun.launch.directory.rotated_reader import GrowingFile

KEPT_BYTES = 1 << 20
"""Of what the launcher has, so much of each log stays: reports of this host quote its end."""
STEP_BYTES = 1 << 20
"""So much is freed at a time."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # <linux/falloc.h>


class FreedSpace:
    """Frees the beginning of logs that are written meanwhile: their size, and where they are read, stays the same.

    That needs a file system that knows holes, as ext4, XFS, Btrfs and tmpfs do, and NFS from 4.2 on.
    """

    def __init__(self, on_refused: Callable[[str], None]) -> None:
        """`on_refused`: told once, in the system's words, that the file system frees nothing."""
        self._on_refused = on_refused
        self._can_free = True
        self._freed: dict[GrowingFile, int] = {}

    def free(self, file: GrowingFile, sent_bytes: int) -> None:
        """Free what is before a place of a log, which the launcher has up to there."""
        begin, end = self._freed.get(file, 0), (sent_bytes - KEPT_BYTES) // STEP_BYTES * STEP_BYTES
        if end > begin and self._can_free:
            try:
                file.edit(lambda descriptor: _punch(descriptor, begin, end - begin))
                self._freed[file] = end
            except OSError as error:
                self._can_free = False
                self._on_refused(error.strerror or type(error).__name__)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _punch(descriptor: int, offset: int, size: int) -> None:
    where, length = ctypes.c_int64(offset), ctypes.c_int64(size)
    if _libc().fallocate64(descriptor, _KEEP_SIZE | _PUNCH_HOLE, where, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
