"""A log directory takes any number of jobs, each in a folder of its own, and shows the latest one's files."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, latest_job, wait_until


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of change of every file."""
    found = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found.items()}


@pytest.mark.parametrize("where", one_fast("--worker_num=1", "--rehearse=1x1"))
def test_a_second_job_touches_nothing_of_the_first_which_runs(
    msrun: JobRunner, workers: Path, tmp_path: Path, where: str
) -> None:
    first = msrun.start("--worker_num=1", workers / "wait.py", cwd=tmp_path)
    first.wait_for(tmp_path / "ready_0")
    wait_until(lambda: "1 of 1" in (first.log_dir / "scheduler.log").read_text(), "the scheduler's last word for now")
    of_first = latest_job(first.log_dir)
    before = snapshot(of_first)
    second = msrun.start(where, workers / "end.py", "all", "0", cwd=tmp_path).finish()
    assert second.code == 0, second.stderr
    assert second.log_dir == latest_job(first.log_dir) != of_first
    assert (first.log_dir / "worker_0.log").read_text() == "rank 0 begins\n"
    assert snapshot(of_first) == before
    listed = msrun.start("list", cwd=tmp_path).finish().stdout.decode().splitlines()[1:]
    assert {line.split()[0]: line.split()[1] for line in listed} == {
        of_first.name: "running",
        second.log_dir.name: "finished",
    }
    stopped = msrun.start("stop", of_first, cwd=tmp_path).finish()
    assert stopped.stdout.decode() == f"job {of_first.name} has ended: interrupted: stopped by SIGTERM\n"
    assert first.finish().code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_jobs_at_once_in_one_directory_all_run(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    options = ["--worker_num=1", "--log_keep_jobs=1"]
    jobs = [msrun.start(*options, workers / "end.py", "all", "0", cwd=tmp_path) for _ in range(5)]
    assert [job.finish().code for job in jobs] == [0] * 5
    assert all((tmp_path / "log_output" / name).exists() for name in ("latest", "worker_0.log", "plan.json"))


@pytest.mark.slow
def test_directory_of_a_killed_launcher_is_free(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    first = msrun.start("--worker_num=2", workers / "wait.py", cwd=tmp_path)
    first.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    first.send(signal.SIGKILL)
    first.finish()
    second = msrun.start("--worker_num=1", workers / "end.py", "all", "0", cwd=tmp_path).finish()
    assert second.code == 0, second.stderr
    assert second.log(0) == b"rank 0 begins\n"


@pytest.mark.slow
def test_links_to_files_that_only_an_earlier_job_has_go_and_old_jobs_do_when_there_are_too_many(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    first = msrun.run("--worker_num=3", workers / "end.py", "2", "1", cwd=tmp_path)
    root = first.log_dir.parent
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (root, first.log_dir)} == {0o700}
    assert (root / "failure.json").exists() and (root / "worker_2.log").exists()
    second = msrun.run("--worker_num=1", "--log_keep_jobs=2", workers / "end.py", "all", "0", cwd=tmp_path)
    own = {"events.jsonl", "plan.json", "rank_table.json", "scheduler.log", "worker_0.log"}
    assert set(os.listdir(root)) == own | {"latest", first.log_dir.name, second.log_dir.name}
    assert set(os.listdir(second.log_dir)) == own | {"job.lock"}
    third = msrun.run("--worker_num=1", "--log_keep_jobs=1", workers / "end.py", "all", "0", cwd=tmp_path)
    assert set(os.listdir(root)) == own | {"latest", third.log_dir.name}


@pytest.mark.parametrize("where", one_fast("--worker_num=1", "--rehearse=1x1"))
def test_log_directory_that_is_removed_during_the_job_is_told_and_the_status_stays(
    msrun: JobRunner, tmp_path: Path, where: str
) -> None:
    (tmp_path / "remove.py").write_text("import shutil\nshutil.rmtree('log_output')\n")
    finished = msrun.run(where, "remove.py", cwd=tmp_path)
    assert finished.code == 0
    assert finished.stderr.count(f"the log directory {tmp_path}/log_output/") == 1
    assert finished.stderr.count(" was removed while the job ran") == 1


@pytest.mark.parametrize("where", one_fast("--worker_num=1", "--rehearse=1x1"))
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
    assert f"the log directory {tmp_path}/log_output/" in finished.stderr, finished.stderr
    assert (finished.code == 0) == (not finished.errors)
