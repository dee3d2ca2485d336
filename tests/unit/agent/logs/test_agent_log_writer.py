"""The log writer on real pipes, in a thread and as a process: every byte in order, and an end that nobody puts off."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_runner import wait_until

from msrun.agent.logs import log_writer, rotated_log
from msrun.agent.logs.log_writer import LogStream, LogWriter
from msrun.agent.logs.rotated_log import LogRotation
from msrun.agent.processes.log_pipes import (
    ALL_PIPES_BYTES,
    MAX_PIPE_BYTES,
    MIN_PIPE_BYTES,
    LogPipes,
    is_exiting,
    pipe_bytes,
)
from msrun.agent.processes.process_spec import LOG_WRITER_ID
from msrun.cluster.messages import Channel
from msrun.cluster.scheduler import Record

DEADLINE_S = 30.0
KEEP = 300


class Running:
    """A log writer in a thread, with the write ends of its pipes."""

    def __init__(self, paths: list[str], max_bytes: int = 1 << 20) -> None:
        self.said = io.StringIO()
        self.pipes: list[int] = []
        self.readers: list[int] = []
        streams = []
        for global_rank, path in enumerate(paths):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self.pipes.append(writer)
            self.readers.append(reader)
            streams.append(LogStream(global_rank, reader, path))
        ours, theirs = socket.socketpair()
        self.server = Channel(ours)
        self._theirs = Channel(theirs)
        self.writer = LogWriter(streams, self._theirs, LogRotation(max_bytes, KEEP), Record(self.said))
        self._thread = threading.Thread(target=self.writer.run)
        self._thread.start()

    def send(self, index: int, data: bytes) -> None:
        """Write all of it, as a worker would."""
        while data:
            data = data[os.write(self.pipes[index], data) :]

    def close_pipes(self) -> None:
        """Be the end of the workers."""
        while self.pipes:
            os.close(self.pipes.pop())

    def wait(self) -> None:
        """Wait for the writer's end."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the log writer has not ended"
        self._theirs.close()

    def release(self) -> None:
        """Let everything go, whatever the test has come to."""
        self.close_pipes()
        self.wait()
        self.server.close()
        for reader in self.writer._open:  # what it has left open ends with its process
            os.close(reader)
        for log in self.writer._logs.values():
            log.close()


def test_writer_that_nobody_stops_does_not_keep_it_when_the_server_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "ORPHAN_END_S", 0.1)
    monkeypatch.setattr(log_writer, "DRAIN_S", 0.1)
    running = Running([str(tmp_path / "a")])
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            running.send(0, b"for ever\n" * 1000)

    flooder = threading.Thread(target=flood, daemon=True)
    flooder.start()
    running.server.close()
    running.wait()
    over.set()
    reader = os.open(f"/proc/self/fd/{running.pipes[0]}", os.O_RDONLY | os.O_NONBLOCK)
    while flooder.is_alive():  # makes room for its last piece
        try:
            os.read(reader, 1 << 20)
        except BlockingIOError:
            flooder.join(0.01)
    os.close(reader)
    running.release()


def test_full_disk_keeps_no_worker_waiting_and_is_told_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotated_log, "open_own_file", os.open)  # a device is no log of ours, but as good as a full disk
    running = Running(["/dev/full", str(tmp_path / "log"), "/dev/full"])
    for _ in range(50):
        for index in range(3):
            running.send(index, b"x" * 9999 + b"\n")  # more than a pipe holds, all in all
    running.close_pipes()
    running.wait()
    assert (tmp_path / "log").stat().st_size == 500_000
    (message,) = running.server.receive()
    assert message == {"reason": "No space left on device", "lost_bytes": {"0": 500_000, "2": 500_000}}
    first, second = running.said.getvalue().splitlines()
    assert "cannot be written (No space left on device)" in first
    assert second.endswith("lost bytes by rank: {0: 500000, 2: 500000}")
    running.release()


def test_pipe_of_a_worker_that_has_ended_is_closed(tmp_path: Path) -> None:
    """A job of many workers and restarts would run out of descriptors."""
    running = Running([str(tmp_path / "0"), str(tmp_path / "1")])
    os.close(running.pipes.pop(0))

    def is_closed() -> bool:
        try:
            os.fstat(running.readers[0])
        except OSError:
            return True
        return False

    wait_until(is_closed, "the first pipe is closed")
    os.fstat(running.readers[1])
    running.server.send({"end": True})
    running.release()


def test_end_of_the_writer_comes_before_that_of_a_worker_which_died_of_it(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    writer, pipes = process.pid, LogPipes(LogRotation(4096, 3), {0: str(tmp_path / "0")})
    pipes.started(LOG_WRITER_ID, writer)
    assert not is_exiting(writer)
    assert pipes.writer_first([(1, 256, 0.0)]) == [(1, 256, 0.0)]
    process.kill()
    wait_until(lambda: is_exiting(writer), "the log writer ends")
    assert pipes.writer_first([(1, 0, 0.0)]) == [(1, 0, 0.0)], "no reason to look for the writer"
    (first, status, _), second = pipes.writer_first([(1, signal.SIGPIPE, 0.0)])
    assert (first, status, second) == (writer, signal.SIGKILL, (1, signal.SIGPIPE, 0.0))
    assert pipes.writer_first([(1, 9, 0.0), (writer, 9, 0.0)]) == [(writer, 9, 0.0), (1, 9, 0.0)]
    assert pipes.end_log_writer() is None
    process.communicate()


@given(st.integers(0, 5000))
def test_pipes_share_what_a_user_may_have(count: int) -> None:
    size = pipe_bytes(count)
    assert MIN_PIPE_BYTES <= size <= MAX_PIPE_BYTES
    assert size & (size - 1) == 0
    assert size * count <= ALL_PIPES_BYTES or size == MIN_PIPE_BYTES
