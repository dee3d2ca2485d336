"""Whatever ends, and however it ends, nothing of a job is left: no process, no folder, no port."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, Running, is_alive, wait_until


def start_family(msrun: JobRunner, workers: Path, cwd: Path, mode: str = "wait") -> tuple[Running, list[int]]:
    """Start two workers, each with a child and a daemon that ignore TERM; return the job and those processes."""
    job = msrun.start("--worker_num=2", "--grace=0.3", workers / "leave_children.py", mode, cwd=cwd)
    files = [cwd / f"{role}_{rank}" for role in ("child", "daemon") for rank in (0, 1)]
    job.wait_for(*files)
    return job, [int(file.read_text()) for file in files]


@pytest.mark.slow
def test_children_and_daemons_of_workers_go_with_the_job_that_is_stopped(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    job, family = start_family(msrun, workers, tmp_path)
    job.send(signal.SIGTERM)
    assert job.finish().code == 143
    assert not [pid for pid in family if is_alive(pid)]


def test_children_and_daemons_of_workers_go_with_the_job_that_ends_well(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    job, family = start_family(msrun, workers, tmp_path, "exit")
    assert job.finish().code == 0
    assert not [pid for pid in family if is_alive(pid)]


@pytest.mark.slow
def test_killed_launcher_takes_everything_with_it(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job, family = start_family(msrun, workers, tmp_path)
    job.send(signal.SIGKILL)
    job.finish()
    msrun.prove_nothing_left()
    wait_until(lambda: not [pid for pid in family if is_alive(pid)], "children and daemons gone", 10)


@pytest.mark.slow
def test_launcher_and_fork_server_killed_together_leave_nothing(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    job, family = start_family(msrun, workers, tmp_path)
    server = job.pid_of_fork_server()
    job.send(signal.SIGKILL)
    os.kill(server, signal.SIGKILL)
    job.finish()
    msrun.prove_nothing_left()
    wait_until(lambda: not [pid for pid in family if is_alive(pid)], "children and daemons gone", 10)


def test_killed_fork_server_ends_the_job_with_3(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job, family = start_family(msrun, workers, tmp_path)
    os.kill(job.pid_of_fork_server(), signal.SIGKILL)
    finished = job.finish()
    assert finished.code == 3
    assert finished.errors == ["msrun: error: the fork server ended unexpectedly; every worker was stopped with it"]
    assert finished.read_json("failure.json")["exit_code"] == 3
    assert not [pid for pid in family if is_alive(pid)]


def test_killed_scheduler_ends_the_job_with_3_and_is_named(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job, family = start_family(msrun, workers, tmp_path)
    os.kill(job.pid_of("scheduler"), signal.SIGKILL)
    finished = job.finish()
    assert finished.code == 3
    (line,) = finished.errors
    assert "the scheduler ended (signal SIGKILL)" in line
    assert str(finished.log_dir / "scheduler.log") in line
    assert not [pid for pid in family if is_alive(pid)]


@pytest.mark.slow
def test_stuck_fork_server_does_not_keep_the_job_alive(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job, family = start_family(msrun, workers, tmp_path)
    os.kill(job.pid_of_fork_server(), signal.SIGSTOP)
    job.send(signal.SIGTERM)
    assert job.finish().code == 143
    assert not [pid for pid in family if is_alive(pid)]


@pytest.mark.slow
def test_stuck_scheduler_does_not_keep_the_job_alive(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = msrun.start("--worker_num=1", workers / "wait.py", cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0")
    os.kill(job.pid_of("scheduler"), signal.SIGSTOP)
    job.send(signal.SIGINT)
    assert job.finish().code == 130


@pytest.mark.slow
def test_killed_worker_takes_its_children_with_it(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job, family = start_family(msrun, workers, tmp_path)
    os.kill(job.pid_of("0"), signal.SIGKILL)
    assert job.finish().code == 137
    assert not [pid for pid in family if is_alive(pid)]


@pytest.mark.parametrize("target", one_fast("launcher", "fork server"))
def test_kill_while_modules_are_imported_leaves_nothing(msrun: JobRunner, tmp_path: Path, target: str) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "slow_import.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\n"
        "os.rename('pid', 'importing')\ntime.sleep(600)\n"
    )
    (tmp_path / "train.py").touch()
    search = os.pathsep.join([str(tmp_path / "modules"), msrun.environ()["PYTHONPATH"]])
    job = msrun.start("--worker_num=2", "--preload=slow_import", "train.py", cwd=tmp_path, env={"PYTHONPATH": search})
    job.wait_for(tmp_path / "importing")
    if target == "launcher":
        job.send(signal.SIGKILL)
        job.finish()
        wait_until(lambda: not msrun.processes(), "processes gone", 10)
    else:
        os.kill(int((tmp_path / "importing").read_text()), signal.SIGKILL)
        assert job.finish().code == 3


@pytest.mark.slow
def test_killed_launcher_that_ignores_hangups_takes_everything_with_it(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    job = msrun.start("--worker_num=2", workers / "wait.py", cwd=tmp_path, prefix=["nohup"])
    job.wait_for(*(tmp_path / f"ready_{rank}" for rank in range(2)))
    job.send(signal.SIGKILL)
    job.finish()
    msrun.prove_nothing_left()
