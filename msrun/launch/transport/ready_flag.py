"""ReadyFlag: a flag that a selector can wait for."""

from __future__ import annotations

import contextlib
import os
import threading


class ReadyFlag:
    """Readable while it is set. Any thread sets it; one waits for it and clears it."""

    def __init__(self) -> None:
        """Open nothing: the descriptor is made by `fileno`."""
        self._lock = threading.Lock()
        self._descriptor = -1
        self._is_set = self._is_closed = False

    def fileno(self) -> int:
        """Return a descriptor for a selector; -1 once it is closed."""
        with self._lock:
            if self._descriptor < 0 and not self._is_closed:
                self._descriptor = os.eventfd(int(self._is_set), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return self._descriptor

    def set(self) -> None:
        """Wake up whoever waits."""
        with self._lock:
            if not self._is_set and self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)
            self._is_set = True

    def clear(self) -> None:
        """Take the flag back, before looking at what it stands for: what comes later sets it again."""
        with self._lock:
            if self._is_set and self._descriptor >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._descriptor)
            self._is_set = False

    def close(self) -> None:
        """Close the descriptor, when no selector has it any more."""
        with self._lock:
            self._is_closed = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
