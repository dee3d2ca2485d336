"""Workers whose program is over and whose process goes on: said, named, and not waited for without an end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, wait_until

WAITS = {"thread": r"thread uploader at linger\.py:\d+ in upload", "atexit": r"linger\.py:\d+ in upload"}


@pytest.mark.parametrize("how", one_fast(*WAITS))
def test_it_is_said_which_rank_waits_for_what_and_it_may_take_its_time(
    msrun: JobRunner, workers: Path, tmp_path: Path, how: str
) -> None:
    job = msrun.start("--worker_num=2", workers / "linger.py", "1", how, cwd=tmp_path)
    wait_until(lambda: "rank 1" in job.stderr, "the rank is named")
    assert re.search(rf"msrun: the program of rank 1 has ended, its process waits for {WAITS[how]}", job.stderr)
    (tmp_path / "go").touch()
    ended = job.finish()
    assert ended.code == 0, ended.stderr
    assert (tmp_path / "uploaded").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", WAITS)
def test_one_that_does_nothing_is_ended_after_the_limit_and_named(
    msrun: JobRunner, workers: Path, tmp_path: Path, how: str
) -> None:
    job = msrun.run("--worker_num=2", "--exit_time_out=8", workers / "linger.py", "1", how, cwd=tmp_path)
    assert job.code == 124, job.stderr
    assert re.search(rf"rank 1 .*waits for {WAITS[how]}", job.errors[0]), job.errors
    assert [worker["global_rank"] for worker in job.read_json("failure.json")["lagging"]] == [1]


@pytest.mark.slow
def test_one_that_has_failed_is_ended_with_its_own_status(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    options = ("--worker_num=2", "--grace=1", "--exit_time_out=8")
    job = msrun.run(*options, workers / "linger.py", "1", "thread", "7", cwd=tmp_path)
    assert job.code == 7, job.stderr
    assert re.search(r"rank 1 on \S+ failed first: exit code 7", job.errors[0])
    assert "thread uploader" in job.log(1).decode()


@pytest.mark.slow
def test_one_that_has_failed_may_end_its_work(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = msrun.start("--worker_num=1", workers / "linger.py", "0", "thread", "7", cwd=tmp_path)
    wait_until(lambda: "the program of rank 0 has ended" in job.stderr, "it is told of")
    (tmp_path / "go").touch()
    assert job.finish().code == 7
    assert (tmp_path / "uploaded").exists()
