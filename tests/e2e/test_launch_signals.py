"""Signals to the launcher: the exit status, the grace that workers get, and that nothing outlives the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, Running, wait_until


def start_waiting(msrun: JobRunner, cwd: Path, script: Path, *words: str, **settings: object) -> Running:
    """Start two workers and wait until both are there."""
    options = ["--worker_num=2", *(word for word in words if word.startswith("-"))]
    arguments = [word for word in words if not word.startswith("-")]
    job = msrun.start(*options, script, *arguments, cwd=cwd, **settings)
    job.wait_for(cwd / "ready_0", cwd / "ready_1")
    return job


@pytest.mark.parametrize("name", one_fast("SIGTERM", "SIGINT", "SIGHUP"))
def test_signal_stops_the_job_and_gives_its_status(msrun: JobRunner, workers: Path, tmp_path: Path, name: str) -> None:
    job = start_waiting(msrun, tmp_path, workers / "wait.py")
    job.send(getattr(signal, name))
    finished = job.finish()
    assert finished.code == 128 + getattr(signal, name)
    assert finished.errors == [f"msrun: error: stopped by {name}"]
    failure = finished.read_json("failure.json")
    assert (failure["reason"], failure["first_failure"]) == (f"stopped by {name}", None)
    assert {other["state"] for other in failure["others"]} == {"stopped by msrun"}
    msrun.prove_nothing_left(deadline_s=0)


@pytest.mark.slow
def test_interrupt_of_the_whole_foreground_group_is_one_interrupt(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    job = start_waiting(msrun, tmp_path, workers / "wait.py")
    os.killpg(job.pid, signal.SIGINT)  # the runner starts msrun as a group of its own
    assert job.finish().code == 130


def test_workers_may_use_the_grace(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, tmp_path, workers / "say_goodbye.py")
    job.send(signal.SIGTERM)
    assert job.finish().code == 143
    assert (tmp_path / "goodbye_0").exists() and (tmp_path / "goodbye_1").exists()


def test_worker_that_ignores_term_is_killed_after_the_grace(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, tmp_path, workers / "wait.py", "--grace=0.3", "ignore-term")
    job.send(signal.SIGTERM)
    finished = job.finish()
    assert finished.code == 143
    ends = [event for event in finished.events if event["event"] == "exited"]
    assert {event["how"] for event in ends} == {"signal SIGKILL"}
    assert (
        "msrun: ranks 0-1 killed: --grace 0.3 s was over; give more, if their work is to end first" in finished.stderr
    )
    states = {other["state"] for other in finished.read_json("failure.json")["others"]}
    assert states == {"stopped by msrun (killed: --grace 0.3 s was over)"}
    stopping = next(event["job_s"] for event in finished.events if event["event"] == "stopping")
    assert all(event["job_s"] - stopping >= 0.3 for event in ends)


@pytest.mark.slow
def test_zero_grace_kills_at_once(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, tmp_path, workers / "wait.py", "--grace=0", "ignore-term")
    job.send(signal.SIGINT)
    assert job.finish().code == 130


@pytest.mark.parametrize("name", one_fast("SIGINT", "SIGHUP", "SIGQUIT"))
def test_worker_gets_the_signal_that_came_and_its_last_work_is_done(
    msrun: JobRunner, workers: Path, tmp_path: Path, name: str
) -> None:
    job = start_waiting(msrun, tmp_path, workers / "save_when_ended.py", name)
    job.send(getattr(signal, name))
    finished = job.finish()
    assert finished.code == 128 + getattr(signal, name)
    for rank in (0, 1):
        assert finished.log(rank).decode().splitlines() == [f"saved after {name}", "finally", "atexit"]


def test_interrupt_that_a_worker_ignores_is_followed_by_term(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, tmp_path, workers / "wait.py", "--grace=1", "ignore-int")
    job.send(signal.SIGINT)
    finished = job.finish()
    assert finished.code == 130
    assert {event["how"] for event in finished.events if event["event"] == "exited"} == {"signal SIGTERM"}


@pytest.mark.slow
def test_workers_on_other_hosts_get_the_signal_that_came(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, tmp_path, workers / "save_when_ended.py", "--rehearse=2x1", "SIGINT")
    job.send(signal.SIGINT)
    finished = job.finish()
    assert finished.code == 130
    assert [finished.log(rank).decode().splitlines()[0] for rank in (0, 1)] == ["saved after SIGINT"] * 2


def test_second_interrupt_does_not_wait_for_the_grace(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, tmp_path, workers / "wait.py", "--grace=600", "ignore-term")
    job.send(signal.SIGINT)
    wait_until(lambda: "stopping all workers" in job.stderr, "msrun says that it stops")
    job.send(signal.SIGINT)
    assert job.finish().code == 130


@pytest.mark.slow
def test_stopped_worker_is_ended_too(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, tmp_path, workers / "wait.py", "--grace=600")
    os.kill(job.pid_of("1"), signal.SIGSTOP)
    job.send(signal.SIGTERM)
    assert job.finish().code == 143


def test_hangup_is_ignored_under_nohup(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, tmp_path, workers / "wait.py", prefix=["nohup"])
    job.send(signal.SIGHUP)
    job.send(signal.SIGTERM)  # signals of lower number come first: HUP, were it heard, would be named
    finished = job.finish()
    assert finished.code == 143
    assert "SIGHUP" not in finished.stderr


def test_first_failure_keeps_its_status_when_the_user_interrupts_meanwhile(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, signal, sys, time\nif os.environ['RANK'] == '0':\n    while not os.path.exists('ready_1'):\n"
        "        time.sleep(0.01)\n    sys.exit(9)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open('ready_1', 'w').close()\ntime.sleep(600)\n"
    )
    job = msrun.start("--worker_num=2", "--grace=600", "train.py", cwd=tmp_path)
    wait_until(lambda: "stopping all workers: rank 0 ended" in job.stderr, "the first failure")
    job.send(signal.SIGINT)
    finished = job.finish()
    assert finished.code == 9
    assert finished.read_json("failure.json")["first_failure"]["global_rank"] == 0


def test_signal_while_the_fork_server_imports_starts_no_worker(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "slow_import.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(600)\n"
    )
    (tmp_path / "train.py").write_text("open('late', 'w').close()\n")
    job = msrun.start(
        "--worker_num=2", "--preload=slow_import", "train.py", cwd=tmp_path, env={"PYTHONPATH": module_path(tmp_path)}
    )
    job.wait_for(tmp_path / "importing")
    job.send(signal.SIGINT)
    assert job.finish().code == 130
    msrun.prove_nothing_left(deadline_s=0)
    assert not (tmp_path / "late").exists()


@pytest.mark.slow
def test_signal_as_early_as_it_can_be_sent_leaves_nothing(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    """From the moment that the job's temporary folder exists, whatever is signalled is cleaned up."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        job = msrun.start("--worker_num=2", workers / "wait.py", cwd=tmp_path)
        wait_until(lambda: any(msrun.temporary.glob("msrun-*")), "the job's folder")
        job.send(signum)
        assert job.finish().code in (128 + signum, -signum)
        msrun.prove_nothing_left()


@pytest.mark.slow
def test_time_limit_of_the_start_ends_the_job_with_124(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "slow_import.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "train.py").touch()
    finished = msrun.run(
        "--worker_num=2",
        "--cluster_time_out=1",
        "--preload=slow_import",
        "train.py",
        cwd=tmp_path,
        env={"PYTHONPATH": module_path(tmp_path)},
    )
    assert finished.code == 124
    (line,) = finished.errors
    assert "--cluster_time_out 1: 2 of 2 workers were not started in time" in line
    assert "ranks 0, 1" in line


def module_path(folder: Path) -> str:
    repository = Path(__file__).resolve().parents[2]
    return os.pathsep.join([str(folder / "modules"), str(repository)])


@pytest.mark.slow
def test_closed_reader_of_the_output_does_not_end_the_job(msrun: JobRunner, tmp_path: Path) -> None:
    """`msrun ... 2>&1 | head -1`: the job goes on to its own end."""
    (tmp_path / "train.py").write_text(
        "import os, time\nprint('x' * 100000)\n"
        "while not os.path.exists('go'):\n    time.sleep(0.01)\nprint('y')\nopen('end', 'w').close()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "msrun", "--worker_num=1", "train.py"],
        cwd=tmp_path,
        env=msrun.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        (tmp_path / "go").touch()
        assert process.wait(60) == 0
    assert (tmp_path / "end").exists()
    events = (tmp_path / "log_output" / "events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["event"] == "over"
