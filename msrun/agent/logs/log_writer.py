"""The log writer: one process per host that writes the logs of its workers when they are to be rotated.

Every worker's stdout and stderr are then one pipe, and this process is the only reader of all pipes. It never runs
user code and never carries a rank. It keeps reading whatever happens to the files, so that no worker waits for a disk
that is full; what cannot be written is thrown away, counted and told. A worker waits only while the disk is slow, and
at most NAP_S while this process lets lines gather.

It ends by itself when the last pipe is closed. A process that a worker left behind may hold a pipe for ever: the fork
server therefore says when the job's processes are gone, and its own end says so too.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass

from msrun import contract
from msrun.agent.logs.rotated_log import LogRotation, RotatedLog
from msrun.cluster.messages import Channel
from msrun.cluster.rendezvous import Record

BLOCK_BYTES = 1 << 18
NAP_S = 0.004  # how long lines may gather before they are read; without it every line would wake this process
NAP_BELOW_BYTES = 1 << 14  # A pipe that gave more than this is read again at once: its worker may be waiting
ORPHAN_END_S = 1.0
"""How long pipes are still read when the fork server is gone: the kernel ends the workers at the same time."""
DRAIN_S = 2.0  # how long the last reading may take once the job's processes are gone


@dataclass(frozen=True)
class LogStream:
    """One worker's output."""

    global_rank: int
    reader_fd: int
    """Read end of its pipe, not blocking."""
    path: str
    """Its log."""


class LogWriter:
    """Event loop of the log writer."""

    def __init__(self, streams: list[LogStream], channel: Channel, rotation: LogRotation, record: Record) -> None:
        """Open all logs. Raises OSError: a log cannot be opened."""
        self._ranks = {stream.reader_fd: stream.global_rank for stream in streams}
        self._logs = {stream.reader_fd: RotatedLog(stream.path, rotation) for stream in streams}
        self._channel = channel
        self._record = record
        self._selector = selectors.DefaultSelector()
        self._open = set(self._logs)
        self._buffer = bytearray(BLOCK_BYTES)
        self._has_told = False
        self._end_at: float | None = None

    def run(self) -> None:
        """Copy until every pipe is closed or the fork server says that nobody writes any more."""
        for reader_fd in self._open:
            self._selector.register(reader_fd, selectors.EVENT_READ)
        self._selector.register(self._channel, selectors.EVENT_READ)
        while self._open and not self._is_late():
            ready = {key.fd for key, _ in self._selector.select(self._time_left())}
            if self._channel.fileno() in ready and self._hear():
                break
            self._copy_round(ready & self._open)
        self._drain()
        self._report()

    @property
    def lost_bytes(self) -> dict[int, int]:
        """What could not be written, by global rank."""
        return {self._ranks[reader_fd]: log.lost_bytes for reader_fd, log in self._logs.items() if log.lost_bytes}

    def _time_left(self) -> float | None:
        return None if self._end_at is None else max(0.0, self._end_at - time.monotonic())

    def _is_late(self) -> bool:
        return self._end_at is not None and time.monotonic() >= self._end_at

    def _hear(self) -> bool:
        """Return whether the fork server has said that nobody writes any more."""
        messages = self._channel.receive()
        if self._channel.is_closed:
            self._selector.unregister(self._channel)
            self._end_at = time.monotonic() + ORPHAN_END_S
        return bool(messages)

    def _copy_round(self, ready: set[int]) -> None:
        most = max(map(self._copy, ready), default=0)
        if most < NAP_BELOW_BYTES and self._end_at is None:
            time.sleep(NAP_S)

    def _copy(self, reader_fd: int) -> int:
        """Copy what a pipe holds, up to one block; returns how much that was."""
        try:
            count = os.readv(reader_fd, [self._buffer])
        except BlockingIOError:
            return 0
        log = self._logs[reader_fd]
        if count:
            log.write(self._buffer, count)
            if log.fault and not self._has_told:
                self._tell_fault(self._ranks[reader_fd], log.fault)
            return count
        self._selector.unregister(reader_fd)
        self._open.remove(reader_fd)
        os.close(reader_fd)
        log.close()
        return 0

    def _drain(self) -> None:
        """Take what is in the pipes still open."""
        end = time.monotonic() + DRAIN_S
        for reader_fd in sorted(self._open):
            while self._copy(reader_fd) and time.monotonic() < end:
                pass

    def _tell_fault(self, global_rank: int, fault: str) -> None:
        self._has_told = True
        self._record.write(
            f"log writer: the log of rank {global_rank} cannot be written ({fault}); workers go on, "
            "and what they write is thrown away where there is no room"
        )

    def _report(self) -> None:
        lost = self.lost_bytes
        if lost:
            fault = next(log.fault for log in self._logs.values() if log.fault)
            self._record.write(f"log writer: lost bytes by rank: {lost}")
            if not self._channel.is_closed:
                self._channel.send({"reason": fault, "lost_bytes": {str(rank): count for rank, count in lost.items()}})


def run_log_writer(streams: list[LogStream], channel_fd: int, rotation: LogRotation) -> int:
    """Write the logs until the end of the job; stdout is `scheduler.log`.

    Returns EXIT_OK, or EXIT_CLUSTER when a log could not even be opened.
    """
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # meant for workers, whose last words are to come
        signal.signal(signum, signal.SIG_IGN)
    record = Record(sys.stdout)
    try:
        writer = LogWriter(streams, Channel(socket.socket(fileno=channel_fd)), rotation, record)
    except OSError as error:
        record.write(f"log writer: cannot open {error.filename}: {error.strerror}")
        return contract.EXIT_CLUSTER
    writer.run()
    return contract.EXIT_OK
