"""What a worker says that has ended its program and not its process."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable

import pytest

from msrun import contract
from msrun.agent.processes import lingering as module
from msrun.agent.processes.lingering import FAILED_S, LINGER_S, describe_wait
from msrun.agent.watch.progress_board import ProgressBoard


@pytest.fixture
def board(board_of_rank_1: ProgressBoard) -> ProgressBoard:
    return board_of_rank_1


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[list[float], list[str], list[int]]]:
    """Watches the end of a program with a status; returns how long was slept, what was said, and exit codes."""

    def watch(status: int) -> tuple[list[float], list[str], list[int]]:
        slept: list[float] = []
        said: list[str] = []
        codes: list[int] = []
        monkeypatch.setattr(module.time, "sleep", slept.append)
        monkeypatch.setattr(module, "_write", said.append)
        monkeypatch.setattr(module, "describe_wait", lambda: "thread upload")
        monkeypatch.setattr(module.os, "_exit", codes.append)
        module._watch(status, 40.0)
        return slept, said, codes

    return watch


def test_program_that_has_finished_may_take_its_time_and_says_so(
    board: ProgressBoard, watched: Callable[[int], tuple[list[float], list[str], list[int]]]
) -> None:
    slept, said, codes = watched(0)
    assert (slept, codes) == ([LINGER_S], [])
    assert said == ["msrun: the program has ended with exit code 0, the process waits for thread upload"]
    record = board.read(1)
    assert (record.name, record.ended_at) == ("thread upload", 40.0)
    assert record.describe(47.0) == "its program has ended, its process waits for thread upload for 7 s"
    assert not board.read(0).ended_at and not board.read(2).ended_at


@pytest.mark.parametrize(("status", "code"), [(3, 3), (-15, 143)])
def test_program_that_has_failed_is_ended_with_its_own_status(
    board: ProgressBoard, watched: Callable[[int], tuple[list[float], list[str], list[int]]], status: int, code: int
) -> None:
    slept, said, codes = watched(status)
    assert (slept, codes) == ([LINGER_S, FAILED_S - LINGER_S], [code])
    assert (
        said[1] == "msrun: the program failed 15 s ago, and the process still waits for thread upload: it is ended now"
    )
    assert not board.read(1).ended_at, "its end is told by the process itself"


@pytest.mark.parametrize("length", [contract.PROGRESS_NAME_BYTES - 1, 10 * contract.PROGRESS_NAME_BYTES])
def test_long_name_is_cut_and_the_moment_stays(board: ProgressBoard, length: int) -> None:
    module._tell("x" * length, 40.0)
    record = board.read(1)
    assert (record.name, record.ended_at) == ("x" * (contract.PROGRESS_NAME_BYTES - 1), 40.0)
    assert struct.calcsize(contract.PROGRESS_RECORD) == contract.PROGRESS_RECORD_BYTES


@pytest.mark.parametrize("name", [contract.MSRUN_PROGRESS, contract.RANK])
def test_worker_without_its_variables_says_nothing(
    board: ProgressBoard, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name)
    module._tell("x", 40.0)
    assert not board.read(1).ended_at


def test_threads_that_keep_a_process_are_named_with_their_place() -> None:
    is_over, stands = threading.Event(), threading.Barrier(3)

    def upload() -> None:
        stands.wait()
        is_over.wait()

    threads = [threading.Thread(target=upload, name=name) for name in ("upload", "second")]
    daemon = threading.Thread(target=is_over.wait, name="daemon", daemon=True)
    for thread in (daemon, *threads):
        thread.start()
    stands.wait()
    try:
        found = describe_wait()
    finally:
        is_over.set()
        for thread in (daemon, *threads):
            thread.join()
    assert found.startswith("thread upload at test_agent_lingering.py:") and found.endswith(" in upload and 1 more")


def test_without_such_threads_it_is_what_the_main_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.threading, "enumerate", lambda: [threading.main_thread()])
    assert describe_wait().endswith(" in test_without_such_threads_it_is_what_the_main_thread_does")


def test_words_reach_standard_error_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    module._write("a\udcffb")
    assert capfd.readouterr().err == "\na\\udcffb\n"
