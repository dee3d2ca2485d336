"""Reads files and named pipes; a pipe that nobody writes to is refused instead of waited for without end."""

from __future__ import annotations

import os
import select
import stat

WAIT_FOR_WRITER_S = 10
"""How long a named pipe without a writer is waited for."""


def read_at_most(name: str, num_bytes: int) -> bytes:
    """Return the first `num_bytes` of a file or pipe. Raises OSError, also for a pipe that stays without a writer."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        start = _await_writer(descriptor) if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else b""
        os.set_blocking(descriptor, True)
        return start + stream.read(num_bytes - len(start))


def _await_writer(descriptor: int) -> bytes:
    """Return when there is something to read, or its end, or somebody who will write; with what was read meanwhile."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if poller.poll(WAIT_FOR_WRITER_S * 1000):
        return b""
    try:
        start = os.read(descriptor, 1)
    except BlockingIOError:
        return b""  # it has a writer, which has not written yet
    if not start:
        raise OSError(0, f"it is a pipe that nothing has written to for {WAIT_FOR_WRITER_S} s")
    return start
