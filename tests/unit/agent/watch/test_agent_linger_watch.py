"""Workers whose program has ended and whose process goes on: told once, ended when nothing happens for the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrun import contract
from msrun.agent.processes.process_control import Usage
from msrun.agent.watch import job_watch
from msrun.agent.watch.job_watch import LingerWatch
from msrun.agent.watch.progress_board import Progress

LIMIT_S = 50.0
RUNNING = {0: 100, 1: 101}


class Workers:
    """Two workers: a test says which of them linger, and what they do."""

    def __init__(self, folder: Path, limit_s: float = LIMIT_S) -> None:
        self.records = {rank: Progress(contract.PHASE_JOINED) for rank in RUNNING}
        self.cpu_s = dict.fromkeys(RUNNING.values(), 0.0)
        self.logs = {rank: folder / f"{rank}.log" for rank in RUNNING}
        board: Any = self
        self.watch = LingerWatch(board, {rank: [str(path)] for rank, path in self.logs.items()}, limit_s)

    def read(self, rank: int) -> Progress:
        return self.records[rank]

    def linger(self, *ranks: int, at: float = 1000.0) -> None:
        for rank in ranks:
            self.records[rank] = Progress(contract.PHASE_LEFT, name=f"thread {rank}", ended_at=at)


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    made = Workers(tmp_path)
    monkeypatch.setattr(job_watch, "session_usage", lambda leaders: {pid: Usage(made.cpu_s[pid]) for pid in leaders})
    return made


def test_rank_that_lingers_is_told_once_with_what_it_waits_for(workers: Workers) -> None:
    assert workers.watch.look(RUNNING, 1000.0) == ({}, None)
    workers.linger(1)
    assert workers.watch.look(RUNNING, 1001.0) == ({1: "thread 1"}, None)
    assert workers.watch.look(RUNNING, 1002.0) == ({}, None)


def test_ranks_that_all_linger_without_a_sign_of_life_end_the_job(workers: Workers) -> None:
    workers.linger(0, 1)
    for now in (1001.0, 1000.0 + LIMIT_S - 0.1):
        assert workers.watch.look(RUNNING, now)[1] is None
    _, error = workers.watch.look(RUNNING, 1000.0 + LIMIT_S)
    assert str(error) == (
        "rank 0 has ended its program and waits for thread 0 (so does rank 1), without a sign of life for 50 s: "
        "end threads and atexit functions, or give more than --exit_time_out 50"
    )


def test_job_goes_on_while_one_rank_runs_its_program(workers: Workers) -> None:
    workers.linger(0)
    assert workers.watch.look(RUNNING, 1e6)[1] is None
    _, error = workers.watch.look({0: 100}, 1e6)
    assert error is not None and "so do" not in str(error)


def test_log_that_grows_is_a_sign_of_life(workers: Workers) -> None:
    workers.linger(0, 1)
    workers.watch.look(RUNNING, 1001.0)
    workers.logs[1].write_text("uploading")
    assert workers.watch.look(RUNNING, 1040.0)[1] is None
    assert workers.watch.look(RUNNING, 1040.0 + LIMIT_S - 1)[1] is None
    assert workers.watch.look(RUNNING, 1040.0 + LIMIT_S)[1] is not None


def test_processor_time_is_a_sign_of_life_where_it_is_more_than_a_trace(workers: Workers) -> None:
    workers.linger(0, 1)
    workers.watch.look(RUNNING, 1001.0)
    workers.cpu_s[100] = 1.0
    workers.watch.look(RUNNING, 1040.0)
    assert workers.watch.look(RUNNING, 1000.0 + LIMIT_S)[1] is None
    workers.cpu_s[100] += 0.001
    assert workers.watch.look(RUNNING, 1040.0 + LIMIT_S)[1] is not None


@pytest.mark.parametrize("limit_s, at", [(0.0, 1000.0), (LIMIT_S, -1000.0)], ids=["no limit", "its program has failed"])
def test_ranks_are_told_of_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float, at: float
) -> None:
    workers = Workers(tmp_path, limit_s)
    workers.linger(0, 1, at=at)
    assert workers.watch.look(RUNNING, 1001.0) == ({0: "thread 0", 1: "thread 1"}, None)
    assert workers.watch.look(RUNNING, 1e9) == ({}, None)
