"""What this worker does when, for `msrun trace`: its steps and its waits in collectives, written into a file.

Only with `msrun --trace`. Layout of the file in `msrun.launch.trace`.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from contextlib import suppress

from msrun import contract

FLUSH_S = 1.0
"""A worker that is killed loses no more."""
MAX_HELD = 256
MAX_BYTES = 64 << 20
"""A longer trace ends here: no viewer opens more, and the disk is for the training."""


class TraceFile:
    """This worker's part of the job's trace. Used by the thread that trains."""

    def __init__(self, folder: str, global_rank: int) -> None:
        """
        Raises:
            OSError: the file cannot be written.
        """
        path = os.path.join(folder, contract.trace_file_name(global_rank))  # noqa: PTH118 - no Path object for one name
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, contract.FILE_MODE)
        self._pid = os.getpid()
        self._left_bytes = MAX_BYTES
        self._lines: list[str] = []
        self._flushed_at = 0.0
        self._step: tuple[int, float] | None = None
        """The step that runs and when it began."""
        attempt = os.environ.get(contract.TORCHELASTIC_RESTART_COUNT, "0")
        head = {"global_rank": global_rank, "host": socket.gethostname(), "pid": self._pid, "attempt": int(attempt)}
        self._add({**head, "time": time.time(), "clock": time.monotonic()})
        self.flush()
        atexit.register(self.close)

    def begin_step(self, step: int) -> None:
        """A step begins, which ends the one before."""
        now = time.monotonic()
        self._end_step(now)
        self._step = step, now

    def add_wait(self, name: str, begin: float) -> None:
        """A wait in a collective, since `begin`, has ended."""
        self._add(["wait", name, round(begin, 6), round(time.monotonic(), 6)])

    def flush(self) -> None:
        """Write what is held."""
        data = "".join(self._lines).encode()
        self._lines.clear()
        self._flushed_at = time.monotonic()
        if os.getpid() == self._pid and len(data) <= self._left_bytes:  # not a child, such as a loader of data
            self._left_bytes -= len(data)
            with suppress(OSError):  # a full disk is no reason to end the training
                os.write(self._descriptor, data)

    def close(self) -> None:
        """Write the last step."""
        self._end_step(time.monotonic())
        self.flush()

    def _end_step(self, now: float) -> None:
        if self._step is not None:
            self._add(["step", str(self._step[0]), round(self._step[1], 6), round(now, 6)])
            self._step = None

    def _add(self, record: object) -> None:
        self._lines.append(json.dumps(record) + "\n")
        if len(self._lines) >= MAX_HELD or time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()
