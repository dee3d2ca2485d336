"""Who watches the workers of a job, and what is said of a hang once the stacks are there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from msrun import contract
from msrun.agent.attempt import Attempt
from msrun.agent.timers import Timers
from msrun.agent.watch import job_watch as module
from msrun.agent.watch.job_watch import JobWatch
from msrun.agent.watch.progress_board import Progress, ProgressBoard
from msrun.agent.watch.watchdog import Hang
from msrun.cluster.membership import Membership
from msrun.errors import ClusterError, HangTimeout
from msrun.planning.build import build_plan
from msrun.planning.placement.host import HostFacts
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

LIMIT_S = 30.0
COMPUTES = '  File "/home/me/train.py", line 41 in step\n'
WAITS = (
    f'  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier\n{COMPUTES}'
)
SILENT = Hang(31.0, (0, 1), {0: "sleeping", 1: "sleeping"})


class Watched:
    """Two workers that run, a watchdog that finds what the test wants, and what the watch has asked to end."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, hang_time_out_s: float = LIMIT_S) -> None:
        spec = LaunchSpec(
            program=Program("script", "x.py"), worker_num=2, local_worker_num=2, working_directory=folder,
            log_dir=folder, hang_time_out_s=hang_time_out_s,
        )  # fmt: skip
        facts = HostFacts("h", "127.0.0.1", (0,))
        plan = build_plan(spec, facts, caller={}, job_id="J", run_dir=str(folder), master_port=1)
        self.folder = folder
        self.found: Hang | None = None
        self.records = {0: Progress(), 1: Progress()}
        self.ended: list[tuple[ClusterError, tuple[int, ...]]] = []
        board = ProgressBoard(folder / "progress", 2)
        patch.setattr(board, "read", lambda rank: self.records[rank])
        patch.setattr(module.Watchdog, "look", lambda *_: self.found)
        patch.setattr(module, "request_stacks", lambda *_: None)
        self.timers = Timers()
        self.watch = JobWatch(plan, plan.hosts[0], board, self.timers)
        self.membership = Membership(range(2))
        for rank in range(2):
            self.membership.started(rank, os.getpid(), 0.0)

    def start(self) -> None:
        self.watch.start(self.membership, lambda error, ranks: self.ended.append((error, ranks)), lambda *_, **__: None)

    def look_for_hang(self) -> None:
        _, action = self.timers._due["hang"]
        action()

    def attempt_with_stacks(self, *stacks: str) -> Attempt:
        """Return the attempt that the hang has ended, when its workers have written where they stand."""
        for rank in range(2):
            (self.folder / f"worker_{rank}.log").write_text(f"Thread 0x1 (most recent call first):\n{COMPUTES}")
        self.watch.request_stacks(self.membership, "the job is stuck")
        for rank, text in enumerate(stacks):
            with (self.folder / f"worker_{rank}.log").open("a") as log:
                log.write(f"\nCurrent thread 0x1 (most recent call first):\n{text}")
        error, lagging = self.ended[-1]
        return Attempt(0, self.membership, fault=error, lagging=lagging)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(tmp_path, monkeypatch)
    watched.start()
    watched.found = SILENT
    watched.look_for_hang()
    yield watched


def test_hang_ends_the_job_with_the_limit_and_the_ranks(watched: Watched) -> None:
    [(error, lagging)] = watched.ended
    assert isinstance(error, HangTimeout) and lagging == (0, 1)
    assert str(error) == "--hang_time_out 30: no progress for 31 s; running: ranks 0-1 (sleeping)"


def test_job_without_a_limit_is_not_watched_for_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, monkeypatch, hang_time_out_s=0)
    watched.start()
    assert watched.timers.is_set("linger") and not watched.timers.is_set("hang")


def test_stacks_tell_which_rank_the_others_wait_for_and_where(watched: Watched) -> None:
    attempt = watched.attempt_with_stacks(WAITS, COMPUTES)
    assert not watched.watch.do_all_wait(attempt)
    watched.watch.explain_hang(attempt)
    assert attempt.lagging == (1,)
    assert attempt.doing == {0: "waits in barrier at train.py:41 in step", 1: "at train.py:41 in step"}
    assert "behind: rank 1 (at train.py:41 in step); rank 0 (waits in barrier" in str(attempt.fault)


def test_ranks_that_all_wait_are_all_named(watched: Watched) -> None:
    attempt = watched.attempt_with_stacks(WAITS, WAITS)
    assert watched.watch.do_all_wait(attempt)
    watched.watch.explain_hang(attempt)
    assert attempt.lagging == (0, 1)
    assert "running: ranks 0-1 (waits in barrier at train.py:41 in step)" in str(attempt.fault)


def test_hang_stays_as_it_was_found_where_a_rank_has_written_no_stacks(watched: Watched) -> None:
    attempt = watched.attempt_with_stacks(WAITS)
    before = str(attempt.fault)
    watched.watch.explain_hang(attempt)
    assert str(attempt.fault) == before and attempt.lagging == (0, 1) and not attempt.doing


def test_workers_that_say_themselves_where_they_are_need_no_stacks(watched: Watched) -> None:
    watched.records[1] = Progress(contract.PHASE_JOINED, steps=3)
    attempt = watched.attempt_with_stacks(WAITS, COMPUTES)
    before = str(attempt.fault)
    watched.watch.explain_hang(attempt)
    assert str(attempt.fault) == before and attempt.lagging == (0, 1)


def test_what_workers_do_is_told_of_those_that_say_it(watched: Watched) -> None:
    watched.records[1] = Progress(contract.PHASE_JOINED, steps=3)
    assert watched.watch.doing(watched.membership) == {1: "step 3"}
    watched.records[0] = Progress(contract.PHASE_LEFT, steps=3)
    assert watched.watch.left(watched.membership) == {0}


def test_nobody_is_watched_any_more_once_that_is_asked_for(watched: Watched) -> None:
    watched.watch.stop()
    assert not any(watched.timers.is_set(name) for name in ("meeting", "hang", "linger"))
