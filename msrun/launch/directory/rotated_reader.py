"""Read a log to its newest byte while it is written and rotated: nothing twice, nothing left out."""

from __future__ import annotations

import contextlib
import os
from collections import deque

from msrun.agent.logs.rotated_log import rotated_path

GAP = b"[msrun: the log was rotated faster than it could be shown; lines may be missing here]\n"


class RotatedReader:
    """Follows one log over its rotations. Holds the file it reads, so that a new name does not take it away."""

    def __init__(self, path: str, keep: int) -> None:
        self._path = path
        self._keep = keep
        self._files: deque[int] = deque()
        """Descriptors, oldest first; the first is being read."""
        self._has_gap = False
        """Between the first file and the next, one may have come and gone."""

    def read(self, size_bytes: int) -> bytes:
        """Return the next bytes, at most so many; empty when there are none now."""
        if not self._files and not self._find_newer():
            return b""
        while not (data := os.read(self._files[0], size_bytes)):
            if len(self._files) == 1 and not self._find_newer():
                return b""
            # It has a successor, so nothing is added to it any more; but that may have happened since it was read.
            data = os.read(self._files[0], size_bytes)
            if data:
                return data
            os.close(self._files.popleft())
            if self._has_gap:
                self._has_gap = False
                return GAP
        return data

    def close(self) -> None:
        """Let go of all files."""
        while self._files:
            os.close(self._files.popleft())

    def _find_newer(self) -> bool:
        """Open what is newer than the newest file that is held; returns whether there was any.

        From the newest to the oldest: a file that is renamed meanwhile is met twice, never missed.
        """
        known = self._inode(self._files[-1]) if self._files else None
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == known:  # noqa: PTH116 - the usual case, many times a second
                return False
        found: list[int] = []
        seen: set[int] = set()
        is_known_found = False
        for number in range(self._keep + 1):
            try:
                file = os.open(rotated_path(self._path, number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue
            inode = self._inode(file)
            is_known_found = inode == known
            if is_known_found or inode in seen:
                os.close(file)
                if is_known_found:
                    break
                continue
            seen.add(inode)
            found.append(file)
        self._has_gap = self._has_gap or (bool(found) and known is not None and not is_known_found)
        self._files.extend(reversed(found))
        return bool(found)

    @staticmethod
    def _inode(file: int) -> int:
        return os.fstat(file).st_ino
