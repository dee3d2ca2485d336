"""The watchdog, on real processes: what counts as progress, and who holds the others up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job_runner import wait_until

from msrun import contract
from msrun.agent.watch.evidence import kernel_state
from msrun.agent.watch.job_watch import Hang, Watchdog, find_lagging
from msrun.agent.watch.progress_board import Progress, ProgressBoard
from msrun.runtime.progress import ProgressRecord

LIMIT_S = 100.0
SLEEPING = "import time; print('up', flush=True); time.sleep(1000)"
BUSY = "print('up', flush=True)\nwhile True: pass"


class Job:
    """Real workers with logs and a board; time is given by the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.board = ProgressBoard(folder / "progress", 3)
        self.board.create()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.now = 1000.0

    def start(self, *sources: str) -> Watchdog:
        for rank, source in enumerate(sources):
            with self.log(rank).open("wb") as log:
                process = subprocess.Popen([sys.executable, "-c", source], stdout=log, start_new_session=True)
            self.processes[rank] = process
            wait_until(lambda rank=rank: self.log(rank).read_bytes(), f"rank {rank} is up")
        return Watchdog(LIMIT_S, self.board, {rank: [str(self.log(rank))] for rank in self.processes})

    def log(self, rank: int) -> Path:
        return self.folder / f"worker_{rank}.log"

    def record(self, rank: int) -> ProgressRecord:
        return ProgressRecord(str(self.folder / "progress"), rank)

    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self.processes.items()}

    def look_on(self, watchdog: Watchdog, until_s: float, between: Callable[[], None] = lambda: None) -> Hang | None:
        """Look every interval for `until_s` seconds of the test's own clock."""
        end = self.now + until_s
        while self.now < end:
            between()
            hang = watchdog.look(self.pids(), self.now)
            if hang is not None:
                return hang
            self.now += watchdog.interval_s
        return None


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for process in job.processes.values():
        process.kill()
        process.wait()
    job.board.close()


def test_silent_idle_workers_are_found_after_the_limit(job: Job) -> None:
    watchdog = job.start(SLEEPING, SLEEPING)
    assert job.look_on(watchdog, LIMIT_S - watchdog.interval_s) is None
    hang = job.look_on(watchdog, 3 * watchdog.interval_s)
    assert hang is not None
    assert hang.lagging == (0, 1)
    assert hang.silent_s >= LIMIT_S
    assert hang.describe().startswith("no progress for 100 s; running: ranks 0-1")


def test_longer_log_of_one_worker_keeps_the_job_alive(job: Job) -> None:
    watchdog = job.start(SLEEPING, SLEEPING)

    def write() -> None:
        with job.log(1).open("ab") as log:
            log.write(b".")

    assert job.look_on(watchdog, 3 * LIMIT_S, write) is None


def test_processor_time_does_not_count_while_a_worker_waits_in_a_collective(job: Job) -> None:
    watchdog = job.start(BUSY, BUSY)
    for rank in range(2):
        record = job.record(rank)
        record.enter_phase(contract.PHASE_JOINED)
        record.begin_step()
        record.begin_wait("all_reduce of 2 ranks")
    job.now = time.monotonic()
    hang = job.look_on(watchdog, 2 * LIMIT_S)
    assert hang is not None
    assert hang.lagging == (0, 1)


def test_rank_that_computes_for_ever_while_the_others_wait_is_the_one_behind(job: Job) -> None:
    watchdog = job.start(SLEEPING, BUSY, SLEEPING)
    for rank in range(3):
        record = job.record(rank)
        record.enter_phase(contract.PHASE_JOINED)
        record.begin_step(41)
        if rank != 1:
            record.begin_wait("all_reduce of 3 ranks")
    job.now = time.monotonic()
    hang = job.look_on(watchdog, 2 * LIMIT_S)
    assert hang is not None
    assert hang.lagging == (1,)
    assert "behind: rank 1 (step 41)" in hang.describe()
    assert "ranks 0, 2 (step 41, waits in all_reduce of 3 ranks for" in hang.describe()


def test_stopped_worker_is_the_one_that_holds_the_others_up(job: Job) -> None:
    watchdog = job.start(SLEEPING, SLEEPING, SLEEPING)
    job.processes[2].send_signal(signal.SIGSTOP)
    wait_until(lambda: kernel_state(job.processes[2].pid) == "stopped by a signal", "rank 2 is stopped")
    hang = job.look_on(watchdog, 2 * LIMIT_S)
    assert hang is not None
    assert hang.lagging == (2,)
    assert "behind: rank 2 (stopped by a signal)" in hang.describe()


def test_time_in_which_the_machine_slept_does_not_count(job: Job) -> None:
    watchdog = job.start(SLEEPING)
    assert job.look_on(watchdog, LIMIT_S / 2) is None
    job.now += 1000 * LIMIT_S  # a laptop was closed
    assert job.look_on(watchdog, LIMIT_S / 2) is None


def test_new_steps_are_progress_without_a_word_in_the_log(job: Job) -> None:
    watchdog = job.start(SLEEPING, SLEEPING)
    record = job.record(0)
    record.enter_phase(contract.PHASE_JOINED)
    assert job.look_on(watchdog, 3 * LIMIT_S, record.begin_step) is None


def test_where_nobody_waits_the_ranks_with_the_fewest_steps_are_behind() -> None:
    running = dict.fromkeys(range(3), os.getpid())
    records = {rank: Progress(steps=steps) for rank, steps in enumerate((4, 3, 4))}
    assert find_lagging(records, running) == (1,)
    records[0] = Progress(steps=4, is_waiting=True)
    assert find_lagging(records, running) == (1, 2), "one waits: for all that are in no collective"
