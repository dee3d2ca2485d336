"""Ctrl-Z and fg: the workers stop and continue with msrun, and no limit counts the pause."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from job_runner import JobRunner, Running, wait_until
from rehearsal import Rehearsals

STILL_S = 0.3


def state_of(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def pause(job: Running, folder: Path, ranks: int) -> None:
    """Pause a job that runs `grow.py`; all its workers, and their children, are still then."""
    files = [folder / f"beats_{rank}{which}" for rank in range(ranks) for which in ("", "_child")]
    job.wait_for(*files)
    job.send(signal.SIGTSTP)
    wait_until(lambda: state_of(job.pid) == "T", "msrun is stopped")
    seen: list[tuple[float, list[int]]] = [(time.monotonic(), [])]

    def are_still() -> bool:
        sizes = [file.stat().st_size for file in files]
        if sizes != seen[-1][1]:
            seen.append((time.monotonic(), sizes))
        return time.monotonic() - seen[-1][0] > STILL_S

    wait_until(are_still, "the workers are still")


def test_a_paused_job_stands_still_and_goes_on_later(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = msrun.start("--worker_num=2", "--hang_time_out=1", workers / "grow.py", cwd=tmp_path)
    pause(job, tmp_path, 2)
    paused_at = time.monotonic()
    wait_until(lambda: time.monotonic() - paused_at > 1.5, "longer than the limit")
    job.send(signal.SIGCONT)
    (tmp_path / "go").touch()
    ended = job.finish()
    assert ended.code == 0, ended.stderr


def test_a_paused_job_that_is_told_to_end_does_when_it_goes_on(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = msrun.start("--worker_num=2", workers / "grow.py", cwd=tmp_path)
    pause(job, tmp_path, 2)
    job.send(signal.SIGTERM)
    job.send(signal.SIGCONT)
    assert job.finish().code == 143


@pytest.mark.slow
def test_a_job_on_several_hosts_is_paused_on_all(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    rehearsals = Rehearsals(msrun, tmp_path)
    job = rehearsals.start("2x1", "--hang_time_out=1", "--heartbeat_time_out=1", workers / "grow.py")
    pause(job, rehearsals.cwd, 2)
    paused_at = time.monotonic()
    wait_until(lambda: time.monotonic() - paused_at > 2.5, "longer than the limits")
    job.send(signal.SIGCONT)
    (rehearsals.cwd / "go").touch()
    ended = job.finish()
    assert ended.code == 0, ended.stderr
