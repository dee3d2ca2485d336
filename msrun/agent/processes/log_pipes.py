"""Logs that are rotated: one pipe per worker, which is its stdout and stderr, and the log writer, one process per host
that is the only reader of all pipes.

The log writer never runs user code and never carries a rank. It keeps reading whatever happens to the files, so that no
worker waits for a disk that is full; what cannot be written is thrown away, counted and told. A worker waits only while
the disk is slow, and at most NAP_S while the log writer lets lines gather.

It ends by itself when the last pipe is closed. A process that a worker left behind may hold a pipe for ever: the fork
server therefore says when the job's processes are gone, and its own end says so too. The server holds no end of a pipe
for longer than it takes to fork: who is at one end has to see the other one close.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msrun import contract
from msrun.agent.logs.rotated_log import LogRotation, RotatedLog
from msrun.agent.processes import process_control
from msrun.agent.processes.process_control import Ended
from msrun.agent.processes.process_spec import LOG_WRITER_ID, ProcessSpec
from msrun.cluster.messages import Channel
from msrun.cluster.rendezvous import Record

MIN_PIPE_BYTES = 1 << 16
MAX_PIPE_BYTES = 1 << 18
"""A quarter of what the kernel grants to anybody (pipe(7), pipe-max-size): more only leaves the processor's cache."""
ALL_PIPES_BYTES = 1 << 24
"""What the pipes of a job may hold together. A user has 64 MiB; beyond that each of his new pipes is tiny."""
PF_EXITING = 0x4
BLOCK_BYTES = 1 << 18
NAP_S = 0.004  # how long lines may gather before they are read; without it every line would wake the log writer
NAP_BELOW_BYTES = 1 << 14  # a pipe that gave more than this is read again at once: its worker may be waiting
ORPHAN_END_S = 1.0
"""How long pipes are still read when the fork server is gone: the kernel ends the workers at the same time."""
DRAIN_S = 2.0  # how long the last reading may take once the job's processes are gone
END_S = DRAIN_S + 0.5  # how long the log writer may take to end


class LogPipes:
    """The pipes of one start, and the channel to their log writer. Owned by the fork server."""

    def __init__(self, rotation: LogRotation, paths: Mapping[int, str]) -> None:
        """Open everything. `rotation`: when files are exchanged, and how many stay. `paths`: global rank -> log. Raises
        OSError: too many open files."""
        self._rotation, self._paths = rotation, dict(paths)
        self._readers: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self.log_writer_pid = 0  # before it was started
        size_bytes = pipe_bytes(len(self._paths))
        with contextlib.ExitStack() as opened:
            for global_rank in self._paths:
                reader, writer = os.pipe()
                opened.callback(os.close, reader)
                opened.callback(os.close, writer)
                os.set_blocking(reader, False)
                with contextlib.suppress(OSError):  # the user's share is used up: slower, not wrong
                    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size_bytes)
                self._readers[global_rank], self._writers[global_rank] = reader, writer
            ours, self._theirs = socket.socketpair()
            opened.pop_all()
        self._channel = Channel(ours)

    # -- in the forked children ---------------------------------------------------------------------------------

    def output_fd(self, process_id: int) -> int | None:
        """Return what is stdout and stderr of a process; None when it is a file."""
        return self._writers.get(process_id)

    @property
    def log_writer_fds(self) -> tuple[int, ...]:
        return (*self._readers.values(), self._theirs.fileno())

    def run_log_writer(self) -> int:
        """Be the log writer until the end of the job; stdout is `scheduler.log`. Returns EXIT_OK, or EXIT_CLUSTER when
        a log could not even be opened."""
        record = Record(sys.stdout)
        try:
            writer = LogWriter(self._readers, self._paths, Channel(self._theirs), self._rotation, record)
        except OSError as error:
            record.write(f"log writer: cannot open {error.filename}: {error.strerror}")
            return contract.EXIT_CLUSTER
        writer.run()
        return contract.EXIT_OK

    # -- in the server ------------------------------------------------------------------------------------------

    def started(self, process_id: int, pid: int) -> None:
        if process_id == LOG_WRITER_ID:
            self.log_writer_pid = pid
            self._close(self._readers)
            self._theirs.close()
        elif process_id in self._writers:
            os.close(self._writers.pop(process_id))

    def _close(self, ends: dict[int, int]) -> None:
        for descriptor in ends.values():
            os.close(descriptor)
        ends.clear()

    def writer_first(self, ended: list[Ended]) -> list[Ended]:
        """Return these ends with the log writer's before those of workers: one that writes to a pipe without a reader
        dies of it, and may be gone before the writer that is dying."""
        pid, end = self.log_writer_pid, time.monotonic() + END_S
        if any(status for _, status, _ in ended) and pid not in {one for one, _, _ in ended}:
            while is_exiting(pid) and time.monotonic() < end:
                with contextlib.suppress(ChildProcessError):
                    found, status, usage = os.wait4(pid, os.WNOHANG)
                    if found:
                        return [(pid, status, usage.ru_maxrss * 1024.0), *ended]
                time.sleep(process_control.POLL_S / 10)
        return sorted(ended, key=lambda end: end[0] != pid)

    def end_log_writer(self) -> dict[str, Any] | None:
        """Tell the log writer that nobody writes any more and wait for its end; one that is stuck is killed. Returns
        None when everything was written, else {"reason": text, "lost_bytes": {global rank as text: bytes}}."""
        self._close(self._writers)  # of workers that were not started
        report: dict[str, Any] | None = None
        if not self.log_writer_pid:
            self._close(self._readers)
            self._theirs.close()
            self._channel.close()
            return report
        end = time.monotonic() + END_S
        has_ended = False
        self._channel.send({"end": True})
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while not has_ended and selector.select(max(0.0, end - time.monotonic())):
                self._channel.is_closed = False  # what it sent before it ended can still be read
                for message in self._channel.receive():
                    report = message
                has_ended = self._channel.is_closed
        self._channel.close()
        if not has_ended:
            os.kill(self.log_writer_pid, signal.SIGKILL)
        return report


class LogWriter:
    """Event loop of the log writer."""

    def __init__(
        self,
        readers: Mapping[int, int],
        paths: Mapping[int, str],
        channel: Channel,
        rotation: LogRotation,
        record: Record,
    ) -> None:
        """Open all logs. `readers`: global rank -> read end of its pipe, not blocking. `paths`: global rank -> log.
        Raises OSError: one cannot be opened."""
        self.logs = {reader: RotatedLog(paths[rank], rotation) for rank, reader in readers.items()}
        self._ranks = {reader: rank for rank, reader in readers.items()}
        self._channel, self._record = channel, record
        self._selector = selectors.DefaultSelector()
        self.open = set(self.logs)  # pipes that somebody may still write to
        self._buffer = bytearray(BLOCK_BYTES)
        self._has_told = False
        self._end_at: float | None = None

    def run(self) -> None:
        """Copy until every pipe is closed or the fork server says that nobody writes any more."""
        for descriptor in (*self.open, self._channel.fileno()):
            self._selector.register(descriptor, selectors.EVENT_READ)
        while self.open and (left_s := self._time_left()) != 0.0:
            ready = {key.fd for key, _ in self._selector.select(left_s)}
            if self._channel.fileno() in ready and self._hear():
                break
            most = max(map(self._copy, ready & self.open), default=0)
            if most < NAP_BELOW_BYTES and self._end_at is None:
                time.sleep(NAP_S)
        end = time.monotonic() + DRAIN_S
        for reader in sorted(self.open):  # what is in the pipes still open
            while self._copy(reader) and time.monotonic() < end:
                pass
        lost = {self._ranks[reader]: log.lost_bytes for reader, log in self.logs.items() if log.lost_bytes}
        if lost:
            fault = next(log.fault for log in self.logs.values() if log.fault)
            self._record.write(f"log writer: lost bytes by rank: {lost}")
            if not self._channel.is_closed:
                self._channel.send({"reason": fault, "lost_bytes": {str(rank): count for rank, count in lost.items()}})

    def _time_left(self) -> float | None:
        return None if self._end_at is None else max(0.0, self._end_at - time.monotonic())

    def _hear(self) -> bool:
        messages = self._channel.receive()
        if self._channel.is_closed:
            self._selector.unregister(self._channel)
            self._end_at = time.monotonic() + ORPHAN_END_S
        return bool(messages)

    def _copy(self, reader: int) -> int:
        """Copy what a pipe holds, up to one block; returns how much that was."""
        try:
            count = os.readv(reader, [self._buffer])
        except BlockingIOError:
            return 0
        log = self.logs[reader]
        if count:
            log.write(self._buffer, count)
            if log.fault and not self._has_told:
                self._has_told = True
                self._record.write(
                    f"log writer: the log of rank {self._ranks[reader]} cannot be written ({log.fault}); workers go on"
                    ", and what they write is thrown away where there is no room"
                )
            return count
        self._selector.unregister(reader)
        self.open.remove(reader)
        os.close(reader)
        log.close()
        return 0


def is_exiting(pid: int) -> bool:
    """Return whether a process has begun to end, or has ended and was not collected yet. PF_EXITING of linux/sched.h is
    set before any of its files is closed."""
    stat = process_control.read_stat(pid)
    return stat is not None and (stat.state == "Z" or bool(stat.flags & PF_EXITING))


def pipe_bytes(count: int) -> int:
    """Return how large each of `count` pipes is to be: a power of two, all together within ALL_PIPES_BYTES."""
    share = ALL_PIPES_BYTES // max(1, count)
    return max(MIN_PIPE_BYTES, min(MAX_PIPE_BYTES, 1 << (share.bit_length() - 1)))


def open_log_pipes(specs: Sequence[ProcessSpec]) -> LogPipes | None:
    """Return the pipes of the processes that are to be started, of which a terminal's other end writes itself; None
    when no log writer is among them."""
    rotation = next((spec.rotation for spec in specs if spec.rotation is not None), None)
    paths = {spec.process_id: spec.log_path for spec in specs if spec.process_id >= 0 and not spec.terminal}
    return None if rotation is None else LogPipes(rotation, paths)


def log_writer_specs(log_dir: str, max_bytes: int, keep: int) -> list[ProcessSpec]:
    """Return the log writer as a process to start, before the workers; nothing when logs are not rotated."""
    if not max_bytes:
        return []
    return [ProcessSpec(LOG_WRITER_ID, f"{log_dir}/{contract.SCHEDULER_LOG}", rotation=LogRotation(max_bytes, keep))]
