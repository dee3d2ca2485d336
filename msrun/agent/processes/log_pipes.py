"""The pipes between workers and their log writer, seen from the fork server that makes them.

The server holds no end of a pipe for longer than it takes to fork: who is at one end has to see the other one close.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msrun import contract
from msrun.agent.logs.log_writer import DRAIN_S, ORPHAN_END_S, LogStream, run_log_writer
from msrun.agent.logs.rotated_log import LogRotation
from msrun.agent.processes import process_control
from msrun.agent.processes.process_control import read_stat
from msrun.agent.processes.process_spec import LOG_WRITER_ID, ProcessSpec
from msrun.agent.processes.reaper import Ended
from msrun.cluster.messages import Channel

MIN_PIPE_BYTES = 1 << 16
MAX_PIPE_BYTES = 1 << 18
"""A quarter of what the kernel grants to anybody (pipe(7), pipe-max-size): more only leaves the processor's cache."""
ALL_PIPES_BYTES = 1 << 24
"""What the pipes of a job may hold together. A user has 64 MiB; beyond that each of his new pipes is tiny."""
PF_EXITING = 0x4
END_S = DRAIN_S + 0.5  # how long the log writer may take to end


class LogPipes:
    """One pipe per worker of one start, and the channel to their log writer. Owned by the fork server."""

    def __init__(self, rotation: LogRotation, paths: Mapping[int, str]) -> None:
        """Open everything. `rotation`: when files are exchanged, and how many stay. `paths`: global rank -> log. Raises
        OSError: too many open files.
        """
        self._rotation = rotation
        self._paths = dict(paths)
        self._readers: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        try:
            self._open_pipes()
            ours, self._theirs = socket.socketpair()
        except OSError:
            for descriptor in (*self._readers.values(), *self._writers.values()):
                os.close(descriptor)
            raise
        self._channel = Channel(ours)
        self.log_writer_pid = 0
        """0 before it was started."""

    def _open_pipes(self) -> None:
        size_bytes = pipe_bytes(len(self._paths))
        for global_rank in self._paths:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            with contextlib.suppress(OSError):  # the user's share is used up: slower, not wrong
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size_bytes)
            self._readers[global_rank], self._writers[global_rank] = reader, writer

    # -- in the forked children ---------------------------------------------------------------------------------

    def output_fd(self, process_id: int) -> int | None:
        """Return what is stdout and stderr of a process; None when it is a file."""
        return self._writers.get(process_id)

    @property
    def log_writer_fds(self) -> tuple[int, ...]:
        """What the log writer has to keep."""
        return (*self._readers.values(), self._theirs.fileno())

    def run_log_writer(self) -> int:
        """Be the log writer; returns its exit status."""
        streams = [LogStream(rank, self._readers[rank], path) for rank, path in self._paths.items()]
        return run_log_writer(streams, self._theirs.detach(), self._rotation)

    # -- in the server ------------------------------------------------------------------------------------------

    def started(self, process_id: int, pid: int) -> None:
        """Let go of what only this process needs."""
        if process_id == LOG_WRITER_ID:
            self.log_writer_pid = pid
            self._close_readers()
        elif process_id in self._writers:
            os.close(self._writers.pop(process_id))

    def _close_readers(self) -> None:
        for reader in self._readers.values():
            os.close(reader)
        self._readers.clear()
        self._theirs.close()

    def writer_first(self, ended: list[Ended]) -> list[Ended]:
        """Return these ends with the log writer's before those of workers.

        A worker that writes to a pipe without a reader dies of it, and may be gone before the writer that is dying.
        """
        pids = {pid for pid, _, _ in ended}
        if any(status for _, status, _ in ended) and self.log_writer_pid not in pids:
            ended = [*ended, *self._reap_dying_writer()]
        return sorted(ended, key=lambda end: end[0] != self.log_writer_pid)

    def _reap_dying_writer(self) -> list[Ended]:
        end = time.monotonic() + END_S
        while is_exiting(self.log_writer_pid) and time.monotonic() < end:
            with contextlib.suppress(ChildProcessError):
                pid, status, usage = os.wait4(self.log_writer_pid, os.WNOHANG)
                if pid:
                    return [(pid, status, usage.ru_maxrss * 1024.0)]
            time.sleep(process_control.POLL_S / 10)
        return []

    def end_log_writer(self) -> dict[str, Any] | None:
        """Tell the log writer that nobody writes any more and wait for its end; one that is stuck is killed.

        Returns None when everything was written, else {"reason": text, "lost_bytes": {global rank as text: bytes}}.
        """
        for writer in self._writers.values():  # of workers that were not started
            os.close(writer)
        self._writers.clear()
        if not self.log_writer_pid:
            self._close_readers()
            self._channel.close()
            return None
        report: dict[str, Any] | None = None
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


def is_exiting(pid: int) -> bool:
    """Return whether a process has begun to end, or has ended and was not collected yet.

    PF_EXITING of linux/sched.h is set before any of its files is closed.
    """
    stat = read_stat(pid)
    return stat is not None and (stat.state == "Z" or bool(stat.flags & PF_EXITING))


def await_log_writer(pid: int, strangers: Collection[int]) -> None:
    """End what is left of a job whose fork server is gone, the log writer last: it writes the workers' last words."""
    end = time.monotonic() + ORPHAN_END_S + END_S
    while time.monotonic() < end:
        process_control.reap_own_children(strangers)
        left = process_control.descendants(os.getpid(), strangers)
        if pid not in left:
            return
        process_control.signal_processes([other for other in left if other != pid], signal.SIGKILL)
        time.sleep(process_control.POLL_S)


def pipe_bytes(count: int) -> int:
    """Return how large each of `count` pipes is to be: a power of two, all together within ALL_PIPES_BYTES."""
    share = ALL_PIPES_BYTES // max(1, count)
    return max(MIN_PIPE_BYTES, min(MAX_PIPE_BYTES, 1 << (share.bit_length() - 1)))


def open_log_pipes(specs: Sequence[ProcessSpec]) -> LogPipes | None:
    """Return the pipes of the processes that are to be started; None when no log writer is among them."""
    writer = next((spec for spec in specs if spec.rotation is not None), None)
    if writer is None or writer.rotation is None:
        return None
    return LogPipes(writer.rotation, {spec.process_id: spec.log_path for spec in specs if _is_logged(spec)})


def _is_logged(spec: ProcessSpec) -> bool:
    """Return whether a process writes to a pipe of the log writer's; a terminal's other end writes itself."""
    return spec.process_id >= 0 and not spec.terminal


def log_writer_specs(log_dir: str, max_bytes: int, keep: int) -> list[ProcessSpec]:
    """Return the log writer as a process to start, before the workers; nothing when logs are not rotated."""
    if not max_bytes:
        return []
    return [ProcessSpec(LOG_WRITER_ID, f"{log_dir}/{contract.SCHEDULER_LOG}", rotation=LogRotation(max_bytes, keep))]
