"""Logs: nothing lost, nothing cut, sizes bounded, whatever the pieces and the disk; and an end that nobody puts off."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_runner import wait_until

from msrun.agent.logs import rotated_log
from msrun.agent.logs.rotated_log import LogRotation, RotatedLog, rename_log, rotated_path
from msrun.agent.processes import log_pipes
from msrun.agent.processes.log_pipes import (
    ALL_PIPES_BYTES,
    MAX_PIPE_BYTES,
    MIN_PIPE_BYTES,
    LogPipes,
    LogWriter,
    is_exiting,
    pipe_bytes,
)
from msrun.agent.processes.process_spec import LOG_WRITER_ID
from msrun.cluster.messages import Channel
from msrun.cluster.rendezvous import Record

KEEP_ALL = 300

slow_disk = settings(deadline=None, max_examples=50)


def files_of(path: Path) -> list[bytes]:
    """Return the content of a log's files, oldest first."""
    paths = [Path(rotated_path(str(path), number)) for number in range(KEEP_ALL, -1, -1)]
    return [file.read_bytes() for file in paths if file.exists()]


def write_pieces(path: Path, pieces: list[bytes], rotation: LogRotation) -> RotatedLog:
    log = RotatedLog(str(path), rotation)
    for piece in pieces:
        buffer = bytearray(piece + b"\nrest of an earlier block\n")
        log.write(buffer, len(piece))
    log.close()
    return log


def prove_rotation(files: list[bytes], whole: bytes, max_bytes: int, bound: int) -> None:
    """Fail unless these files, oldest first, are `whole` rotated between its lines at `max_bytes`."""
    assert b"".join(files) == whole
    for older in files[:-1]:
        assert older.endswith(b"\n") or len(older) == max_bytes + bound
    for file in files:
        *before, _ = file.removesuffix(b"\n").split(b"\n")
        assert sum(len(line) + 1 for line in before) <= max_bytes  # beyond it goes only the line that crosses
        assert len(file) <= max_bytes + bound


LINES = st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"\r")), max_size=12)


@slow_disk
@given(lines=LINES, cuts=st.lists(st.integers(0, 250), max_size=12), max_bytes=st.integers(1, 100), data=st.data())
def test_files_together_are_what_was_written_and_begin_with_a_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int], max_bytes: int, data: st.DataObject
) -> None:
    whole = b"\n".join(lines)
    if data.draw(st.booleans()) and whole:
        whole += b"\n"
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[begin:end] for begin, end in pairwise(edges)]
    path = tmp_path_factory.mktemp("log") / "worker_0.log"
    log = write_pieces(path, pieces, LogRotation(max_bytes, KEEP_ALL))
    prove_rotation(files_of(path), whole, max_bytes, rotated_log.LINE_BOUND_BYTES)
    assert (log.lost_bytes, log.fault) == (0, "")


@slow_disk
@given(cuts=st.lists(st.integers(1, 150), max_size=8), max_bytes=st.integers(1, 60), bound=st.integers(0, 60))
def test_line_without_an_end_is_cut_at_the_bound(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], max_bytes: int, bound: int
) -> None:
    whole = bytes(ord("a") + index % 26 for index in range(150))
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[begin:end] for begin, end in pairwise(edges)]
    path = tmp_path_factory.mktemp("log") / "worker_0.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotated_log, "LINE_BOUND_BYTES", bound)
        write_pieces(path, pieces, LogRotation(max_bytes, KEEP_ALL))
    files = files_of(path)
    assert b"".join(files) == whole
    assert {len(file) for file in files[:-1]} <= {max_bytes + bound}


def test_whole_lines_that_fit_are_not_torn_from_their_file(tmp_path: Path) -> None:
    write_pieces(tmp_path / "log", [b"aaa\nbbb\nccc\n"], LogRotation(8, 5))
    assert files_of(tmp_path / "log") == [b"aaa\nbbb\n", b"ccc\n"]


def test_only_so_many_older_files_stay_and_the_newest_are_those(tmp_path: Path) -> None:
    write_pieces(tmp_path / "log", [f"{number}\n".encode() for number in range(10)], LogRotation(2, 3))
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1", "log.2", "log.3"]
    assert files_of(tmp_path / "log") == [b"6\n", b"7\n", b"8\n", b"9\n"]


def test_log_goes_on_at_the_end_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"old\n")
    write_pieces(tmp_path / "log", [b"a\n", b"b\n"], LogRotation(6, 3))
    assert files_of(tmp_path / "log") == [b"old\na\n", b"b\n"]


class Disk:
    """Stands for os.write: takes so many bytes and is full then."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(0)
    monkeypatch.setattr(rotated_log.os, "write", disk.write)
    monkeypatch.setattr(rotated_log, "RETRY_S", 0.0)
    return disk


def test_log_goes_on_with_the_next_line_and_says_what_is_missing_when_there_is_room_again(
    tmp_path: Path, disk: Disk
) -> None:
    disk.room = 6
    log = RotatedLog(str(tmp_path / "log"), LogRotation(1000, 3))
    for piece in (b"one\ntwo\nthr", b"ee\nfour"):
        log.write(bytearray(piece), len(piece))
    disk.room = 1000
    for piece in (b" and\nfive\n", b"six\n"):
        log.write(bytearray(piece), len(piece))
    log.close()
    lost = len(b"o\nthree\nfour and\n")
    marker = f"\n[msrun: {lost} bytes of this log were lost: No space left on device]\n".encode()
    assert files_of(tmp_path / "log") == [b"one\ntw" + marker + b"five\nsix\n"]
    assert log.lost_bytes == lost


@slow_disk
@given(pieces=st.lists(st.binary(max_size=20), max_size=12), room=st.integers(0, 200), max_bytes=st.integers(1, 50))
def test_every_byte_is_written_or_counted(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], room: int, max_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "worker_0.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotated_log.os, "write", Disk(room).write)
        log = write_pieces(path, pieces, LogRotation(max_bytes, KEEP_ALL))
    whole = b"".join(pieces)
    assert log.lost_bytes == max(0, len(whole) - room)
    assert b"".join(files_of(path)) == whole[:room]


def test_folder_that_is_gone_loses_but_does_not_raise(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    log = RotatedLog(str(tmp_path / "folder" / "log"), LogRotation(2, 3))
    log.write(bytearray(b"a\n"), 2)
    (tmp_path / "folder" / "log").unlink()
    (tmp_path / "folder").rmdir()
    log.write(bytearray(b"b\n"), 2)
    log.close()
    assert (log.lost_bytes, log.fault) == (2, "No such file or directory")


def test_log_is_renamed_with_its_older_files(tmp_path: Path) -> None:
    write_pieces(tmp_path / "log", [b"a\nb\nc\n"], LogRotation(2, 5))
    rename_log(str(tmp_path / "log"), str(tmp_path / "log.attempt_0"))
    assert sorted(os.listdir(tmp_path)) == ["log.attempt_0", "log.attempt_0.1", "log.attempt_0.2"]
    assert files_of(tmp_path / "log.attempt_0") == [b"a\n", b"b\n", b"c\n"]
    rename_log(str(tmp_path / "no log"), str(tmp_path / "other"))


DEADLINE_S = 30.0


class Running:
    """A log writer in a thread, with the write ends of its pipes."""

    def __init__(self, paths: list[str]) -> None:
        self.pipes: list[int] = []
        self.readers: list[int] = []
        for _ in paths:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self.pipes.append(writer)
            self.readers.append(reader)
        ours, theirs = socket.socketpair()
        self.server = Channel(ours)
        self._theirs = Channel(theirs)
        self.writer = LogWriter(
            dict(enumerate(self.readers)),
            dict(enumerate(paths)),
            self._theirs,
            LogRotation(1 << 20, 3),
            Record(io.StringIO()),
        )
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
        for reader in self.writer.open:  # what it has left open ends with its process
            os.close(reader)
        for log in self.writer.logs.values():
            log.close()


def test_writer_that_nobody_stops_does_not_keep_it_when_the_server_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_pipes, "ORPHAN_END_S", 0.1)
    monkeypatch.setattr(log_pipes, "DRAIN_S", 0.1)
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
