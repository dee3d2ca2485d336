"""Have what is written reach the disk while more is written, instead of all of it at the end."""

from __future__ import annotations

import contextlib
import os
import threading

_FLUSH_BYTES = 32 << 20


class Flusher:
    """Flushes one open file, beside its writer, whenever some megabytes have been written since the last time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._waiting = 0

    def note(self, count: int) -> None:
        """Say that so many more bytes are written.

        Raises:
            OSError: earlier ones could not reach the disk; also from `finish`.
        """
        self._waiting += count
        if self._waiting < _FLUSH_BYTES or (self._thread is not None and self._thread.is_alive()):
            return
        self._raise()
        self._waiting = 0
        self._thread = threading.Thread(target=self._flush, name="msrun-flush", daemon=True)
        with contextlib.suppress(RuntimeError):  # no new threads while the interpreter ends: all is flushed at the end
            self._thread.start()
            return
        self._thread = None

    def finish(self) -> None:
        """Return when all of the file has reached the disk."""
        self.close()
        self._raise()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Wait for what is going on; harmless to call again."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _flush(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
