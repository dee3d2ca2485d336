"""The log directory is one job's at a time: a second one is refused, the next one finds it as if it were new."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from job_runner import JobRunner, Running, wait_until


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of change of every file."""
    found = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found.items()}


@pytest.mark.parametrize("join", ["--join=True", "--join=False"])
def test_second_job_is_refused_before_it_touches_anything(
    msrun: JobRunner, workers: Path, tmp_path: Path, join: str
) -> None:
    first = msrun.start("--worker_num=1", workers / "wait.py", cwd=tmp_path)
    first.wait_for(tmp_path / "ready_0")
    wait_until(lambda: "1 of 1" in (first.log_dir / "scheduler.log").read_text(), "the scheduler's last word for now")
    before = snapshot(first.log_dir)
    second = msrun.start("--worker_num=3", join, workers / "end.py", "all", "0", cwd=tmp_path).finish()
    assert second.code == 2
    job_id = second.read_json("plan.json")["job_id"]
    assert second.stderr == (
        f"msrun: error: --log_dir {tmp_path}/log_output: in use by job {job_id} (pid {first.pid} on host "
        f"{os.uname().nodename}); give another --log_dir, or end that job with msrun --stop {tmp_path}/log_output\n"
    )
    assert snapshot(first.log_dir) == before
    first.send(signal.SIGTERM)
    assert first.finish().code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_remedy_can_be_pasted_into_a_shell(msrun: JobRunner, workers: Path, odd_path: Path) -> None:
    first = msrun.start("--worker_num=1", workers / "wait.py", cwd=odd_path)
    first.wait_for(odd_path / "ready_0")
    refused = msrun.start("--worker_num=1", workers / "wait.py", cwd=odd_path).finish()
    match = re.search(r"or end that job with msrun (--stop .*)\n", refused.stderr)
    assert match, refused.stderr
    shell = ["sh", "-c", f'exec "$0" -m msrun {match[1]}', sys.executable]
    assert msrun.start(cwd=odd_path, command=shell).finish().code == 0
    assert first.finish().code == 128 + signal.SIGTERM


def test_directory_of_a_killed_launcher_is_free(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    first = msrun.start("--worker_num=2", workers / "wait.py", cwd=tmp_path)
    first.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    first.send(signal.SIGKILL)
    first.finish()
    second = msrun.start("--worker_num=1", workers / "end.py", "all", "0", cwd=tmp_path).finish()
    assert second.code == 0, second.stderr
    assert second.log(0) == b"rank 0 begins\n"


@pytest.mark.slow
def test_of_many_jobs_at_once_exactly_one_runs(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    jobs = [msrun.start("--worker_num=1", workers / "wait.py", cwd=tmp_path) for _ in range(5)]
    (running,) = [job for job in jobs if not is_refused(job)]
    running.wait_for(tmp_path / "ready_0")
    running.send(signal.SIGTERM)
    assert running.finish().code == 128 + signal.SIGTERM


def is_refused(job: Running) -> bool:
    """Return whether a job was refused; wait until that is known."""
    wait_until(lambda: job.process.poll() is not None or "1 worker on" in job.stderr, "refused or started")
    assert job.process.poll() in (None, 2)
    return job.process.poll() == 2


@pytest.mark.slow
def test_next_job_leaves_nothing_of_a_bigger_one_and_nothing_else_goes(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    first = msrun.run("--worker_num=3", workers / "end.py", "2", "1", cwd=tmp_path)
    assert (first.log_dir / "failure.json").exists()
    ours = ["worker_2.attempt_0.log", "worker_0.log.1", "msrun.log"]
    foreign = ["notes.txt", "worker_5.log", "worker_2.log.gz", "checkpoint_2.log"]
    for name in ours + foreign:
        (first.log_dir / name).write_text("old")
    second = msrun.run("--worker_num=1", workers / "end.py", "all", "0", cwd=tmp_path)
    assert second.code == 0
    own = {"events.jsonl", "job.lock", "plan.json", "rank_table.json", "scheduler.log", "worker_0.log"}
    assert set(os.listdir(second.log_dir)) == own | set(foreign)
    assert {(second.log_dir / name).read_text() for name in foreign} == {"old"}


@pytest.mark.parametrize("where", ["--worker_num=1", "--rehearse=1x1"])
def test_log_directory_that_is_removed_during_the_job_is_told_and_the_status_stays(
    msrun: JobRunner, tmp_path: Path, where: str
) -> None:
    (tmp_path / "remove.py").write_text("import shutil\nshutil.rmtree('log_output')\n")
    finished = msrun.run(where, "remove.py", cwd=tmp_path)
    assert finished.code == 0
    assert finished.stderr.count(f"the log directory {tmp_path}/log_output was removed while the job ran") == 1


@pytest.mark.parametrize("where", ["--worker_num=1", "--rehearse=1x1"])
def test_log_directory_that_is_removed_before_the_workers_have_started_is_told(
    msrun: JobRunner, tmp_path: Path, where: str
) -> None:
    (tmp_path / "early.py").write_text(
        "import os, shutil\nif os.path.isdir('log_output'):\n    shutil.rmtree('log_output')\n"
    )
    (tmp_path / "train.py").write_text("import early\n")
    search = os.pathsep.join([str(tmp_path), msrun.environ()["PYTHONPATH"]])
    options = [where, "--preload=early", "--forward_env=PYTHONPATH"]
    finished = msrun.run(*options, "train.py", cwd=tmp_path, env={"PYTHONPATH": search})
    assert f"the log directory {tmp_path}/log_output was removed" in finished.stderr, finished.stderr
    assert (finished.code == 0) == (not finished.errors)
