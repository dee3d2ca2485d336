"""Pipes, log writer and workers as real processes, seen from the fork server."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_runner import wait_until

from msrun.agent.logs import rotated_log
from msrun.agent.logs.rotated_log import LogRotation
from msrun.agent.processes import log_pipes
from msrun.agent.processes.log_pipes import (
    ALL_PIPES_BYTES,
    MAX_PIPE_BYTES,
    MIN_PIPE_BYTES,
    LogPipes,
    await_log_writer,
    is_exiting,
    open_log_pipes,
    pipe_bytes,
)
from msrun.agent.processes.process_control import descendants
from msrun.agent.processes.process_spec import LOG_WRITER_ID, SCHEDULER_ID, ProcessSpec
from msrun.planning.record_json import decode_record, encode_record

ROTATION = LogRotation(4096, 3)


class Server:
    """Forks as the fork server does."""

    def __init__(self, pipes: LogPipes) -> None:
        self.pipes = pipes
        self.children: list[int] = []

    def fork(self, process_id: int, body: Callable[[], int]) -> int:
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                status = body()
            finally:
                os._exit(status)
        self.children.append(pid)
        self.pipes.started(process_id, pid)
        return pid

    def start_writer(self) -> int:
        pipes = self.pipes

        def body() -> int:
            null = os.open(os.devnull, os.O_WRONLY)
            sys.stdout = os.fdopen(null, "w")
            kept = set(pipes.log_writer_fds)
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in kept and int(name) != null:
                    try:
                        os.close(int(name))
                    except OSError:
                        continue
            return pipes.run_log_writer()

        return self.fork(LOG_WRITER_ID, body)

    def start_worker(self, global_rank: int, body: Callable[[int], None]) -> int:
        output = self.pipes.output_fd(global_rank)
        assert output is not None

        def work() -> int:
            for rank in range(8):
                other = self.pipes.output_fd(rank)
                if other is not None and other != output:
                    os.close(other)
            body(output)
            return 0

        return self.fork(global_rank, work)

    def wait(self, pid: int) -> int:
        self.children.remove(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str]], Server]]:
    servers = []

    def build(paths: list[str]) -> Server:
        servers.append(Server(LogPipes(ROTATION, dict(enumerate(paths)))))
        return servers[-1]

    yield build
    for server in servers:
        for pid in list(server.children):
            os.kill(pid, signal.SIGKILL)
            server.wait(pid)


def test_writer_ends_with_its_workers_and_everything_is_written(
    start: Callable[[list[str]], Server], tmp_path: Path
) -> None:
    server = start([str(tmp_path / "0"), str(tmp_path / "1")])
    writer = server.start_writer()
    workers = [server.start_worker(rank, lambda fd: (os.write(fd, b"hello\n"), None)[1]) for rank in (0, 1)]
    assert [server.wait(pid) for pid in workers] == [0, 0]
    assert server.wait(writer) == 0
    assert server.pipes.end_log_writer() is None
    assert [(tmp_path / name).read_bytes() for name in "01"] == [b"hello\n"] * 2


def test_server_holds_no_end_of_a_pipe_after_the_start(start: Callable[[list[str]], Server], tmp_path: Path) -> None:
    before = open_pipes()
    server = start([str(tmp_path / "0")])
    assert open_pipes() - before
    server.start_writer()
    server.start_worker(0, lambda _: None)
    assert open_pipes() == before
    server.pipes.end_log_writer()


def open_pipes() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return {target for target in found if target.startswith("pipe:")}


def test_writer_that_signals_meant_for_workers_reach_goes_on(
    start: Callable[[list[str]], Server], tmp_path: Path
) -> None:
    server = start([str(tmp_path / "0")])
    writer = server.start_writer()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        wait_until(partial(_ignores, writer, signum), f"{signum.name} is ignored")
        os.kill(writer, signum)
    worker = server.start_worker(0, lambda fd: (os.write(fd, b"last words\n"), None)[1])
    assert server.wait(worker) == 0
    assert server.wait(writer) == 0
    assert server.pipes.end_log_writer() is None
    assert (tmp_path / "0").read_bytes() == b"last words\n"


def _ignores(pid: int, signum: int) -> bool:
    line = next(x for x in Path("/proc", str(pid), "status").read_text().splitlines() if x.startswith("SigIgn"))
    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)


def test_loss_is_reported_also_when_the_writer_has_ended_long_ago(
    start: Callable[[list[str]], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotated_log, "open_own_file", os.open)  # a device is no log of ours, but as good as a full disk
    server = start(["/dev/full"])
    writer = server.start_writer()
    worker = server.start_worker(0, lambda fd: (os.write(fd, b"12345\n"), None)[1])
    server.wait(worker)
    assert server.wait(writer) == 0
    assert server.pipes.end_log_writer() == {"reason": "No space left on device", "lost_bytes": {"0": 6}}


def test_writer_that_is_stuck_is_killed(
    start: Callable[[list[str]], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_pipes, "END_S", 0.2)
    server = start([str(tmp_path / "0")])
    writer = server.start_writer()
    os.kill(writer, signal.SIGSTOP)
    assert server.pipes.end_log_writer() is None
    assert server.wait(writer) == -signal.SIGKILL


def test_end_of_the_writer_comes_before_that_of_a_worker_which_died_of_it(
    start: Callable[[list[str]], Server], tmp_path: Path
) -> None:
    server = start([str(tmp_path / "0")])
    writer = server.start_writer()
    assert not is_exiting(writer)
    assert server.pipes.writer_first([(1, 256, 0.0)]) == [(1, 256, 0.0)]
    os.kill(writer, signal.SIGKILL)
    wait_until(lambda: is_exiting(writer), "the log writer ends")
    assert server.pipes.writer_first([(1, 0, 0.0)]) == [(1, 0, 0.0)], "no reason to look for the writer"
    (first, status, _), second = server.pipes.writer_first([(1, signal.SIGPIPE, 0.0)])
    assert (first, status, second) == (writer, signal.SIGKILL, (1, signal.SIGPIPE, 0.0))
    server.children.remove(writer)
    assert server.pipes.writer_first([(1, 9, 0.0), (writer, 9, 0.0)]) == [(writer, 9, 0.0), (1, 9, 0.0)]
    assert server.pipes.end_log_writer() is None


def test_log_writer_outlives_what_is_left_of_the_job_and_writes_its_last_words(
    start: Callable[[list[str]], Server], tmp_path: Path
) -> None:
    strangers = descendants(os.getpid())  # such as the servers that multiprocessing keeps for other tests
    server = start([str(tmp_path / "0")])
    writer = server.start_writer()

    def stay(fd: int) -> None:
        os.write(fd, b"last words\n")
        (tmp_path / "ready").touch()
        signal.pause()

    server.start_worker(0, stay)
    wait_until((tmp_path / "ready").exists, "worker has written")
    await_log_writer(writer, strangers=strangers)
    server.children.clear()  # reaped
    assert set(descendants(os.getpid())) == set(strangers)
    assert server.pipes.end_log_writer() is None
    assert (tmp_path / "0").read_bytes() == b"last words\n"


@given(st.integers(0, 5000))
def test_pipes_share_what_a_user_may_have(count: int) -> None:
    size = pipe_bytes(count)
    assert MIN_PIPE_BYTES <= size <= MAX_PIPE_BYTES
    assert size & (size - 1) == 0
    assert size * count <= ALL_PIPES_BYTES or size == MIN_PIPE_BYTES


def test_pipes_are_opened_for_workers_that_start_with_a_log_writer_only(tmp_path: Path) -> None:
    scheduler = ProcessSpec(SCHEDULER_ID, "/l/scheduler.log")
    workers = [ProcessSpec(rank, str(tmp_path / str(rank))) for rank in (0, 1)]
    assert open_log_pipes([scheduler]) is None
    assert open_log_pipes([scheduler, *workers]) is None
    writer = ProcessSpec(LOG_WRITER_ID, "/l/scheduler.log", rotation=ROTATION)
    pipes = open_log_pipes([writer, *workers])
    assert pipes is not None
    assert pipes.output_fd(0) is not None and pipes.output_fd(1) is not None
    assert pipes.output_fd(2) is None and pipes.output_fd(SCHEDULER_ID) is None
    for process_id in (LOG_WRITER_ID, 0, 1):
        pipes.started(process_id, 0)
    pipes.end_log_writer()


def test_log_writer_spec_survives_json() -> None:
    spec = ProcessSpec(LOG_WRITER_ID, "/l/scheduler.log", rotation=ROTATION)
    assert decode_record(ProcessSpec, json.loads(json.dumps(encode_record(spec)))) == spec


def test_process_that_is_not_there_is_not_exiting() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    wait_until(lambda: is_exiting(pid), "it has ended and is not collected yet")
    os.waitpid(pid, 0)
    assert not is_exiting(pid)
