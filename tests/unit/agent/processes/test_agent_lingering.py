"""What a worker says that has ended its program and not its process."""

from __future__ import annotations

import threading

import pytest

from msrun.agent.processes import main_module as module
from msrun.agent.processes.main_module import describe_wait
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
