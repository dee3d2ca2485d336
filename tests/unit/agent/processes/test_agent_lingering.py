"""What a worker says that has ended its program and not its process."""

from __future__ import annotations

import struct
import threading

import pytest

from msrun import contract
from msrun.agent.processes import main_module as module
from msrun.agent.processes.main_module import LINGER_S, describe_wait
from msrun.agent.watch.progress_board import ProgressBoard


@pytest.fixture
def board(board_of_rank_1: ProgressBoard) -> ProgressBoard:
    return board_of_rank_1


class Ending:
    """A worker whose program has ended: how time passes in it, how much it works, what it says, how it exits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.used_s, self.share = 40.0, 0.0, 0.0
        self.said: list[str] = []
        patch.setattr(module.time, "sleep", self.sleep)
        patch.setattr(module.time, "monotonic", lambda: self.now)
        patch.setattr(module.time, "process_time", lambda: self.used_s)
        patch.setattr(module, "_write", self.said.append)
        patch.setattr(module, "describe_wait", lambda: "thread upload")
        patch.setattr(module.os, "_exit", self.exit)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.used_s += self.share * seconds
        if self.now > 540.0:
            self.share = 0.0

    def exit(self, code: int) -> None:
        raise SystemExit(code)


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    return Ending(monkeypatch)


def test_program_that_has_finished_may_take_its_time_and_says_so(board: ProgressBoard, ending: Ending) -> None:
    module._watch(0, 40.0)
    assert ending.now == 40.0 + LINGER_S
    words = "msrun: the program has ended with exit code 0, the process waits for thread upload (--exit_time_out 300)"
    assert ending.said == [words]
    record = board.read(1)
    assert (record.name, record.ended_at) == ("thread upload", 40.0)
    assert record.describe(47.0) == "its program has ended, its process waits for thread upload for 7 s"
    assert not board.read(0).ended_at and not board.read(2).ended_at


@pytest.mark.parametrize(("status", "code"), [(3, 3), (-15, 143)])
@pytest.mark.parametrize("share, end", [(0.0, 100.0), (0.01, 600.0)], ids=["idle", "busy until 540"])
def test_program_that_has_failed_is_ended_with_its_own_status_once_it_does_nothing(
    board: ProgressBoard,
    ending: Ending,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: int,
    share: float,
    end: float,
) -> None:
    monkeypatch.setenv(contract.MSRUN_EXIT_TIME_OUT, "60")
    ending.share = share
    with pytest.raises(SystemExit) as error:
        module._watch(status, 40.0)
    assert error.value.code == code
    assert end <= ending.now <= end + 2
    assert "--exit_time_out 60" in ending.said[-1] and ending.said[-1].endswith("thread upload: it is ended now")
    assert board.read(1).ended_at == -40.0


def test_without_a_limit_a_program_that_has_failed_is_let_alone(
    board: ProgressBoard, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(contract.MSRUN_EXIT_TIME_OUT, "0")
    module._watch(3, 40.0)
    assert len(ending.said) == 1


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
