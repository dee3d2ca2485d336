"""--join=False: the prompt comes back at once, the job goes on with all its guarantees and ends when told to."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest
from job_runner import JobRunner, is_alive, wait_until


def start_detached(msrun: JobRunner, cwd: Path, *words: str | Path) -> int:
    """Return the process id of the launcher in the background."""
    finished = msrun.start("--worker_num=2", "--join=False", *words, cwd=cwd).finish()
    assert finished.code == 0
    match = re.search(r"detached as pid (\d+), logs in (\S+); kill \d+ ends the job", finished.stderr)
    assert match, finished.stderr
    assert Path(match[2]) == cwd / "log_output"
    return int(match[1])


def test_detached_job_runs_and_ends_with_term(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    pid = start_detached(msrun, tmp_path, workers / "wait.py")
    wait_until(lambda: (tmp_path / "ready_0").exists() and (tmp_path / "ready_1").exists(), "both workers")
    assert os.getsid(pid) == pid
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_alive(pid), "the launcher's end")
    msrun.prove_nothing_left()
    log = (tmp_path / "log_output" / "msrun.log").read_text()
    assert "msrun: error: stopped by SIGTERM" in log
    assert (tmp_path / "log_output" / "failure.json").exists()


def test_detached_job_that_fails_tells_so_in_its_log(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    pid = start_detached(msrun, tmp_path, workers / "end.py", "1", "5")
    wait_until(lambda: not is_alive(pid), "the launcher's end")
    assert "failed first: exit code 5" in (tmp_path / "log_output" / "msrun.log").read_text()


def test_detached_job_outlives_a_hangup_of_its_terminal(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = msrun.start("--worker_num=1", "--join=False", workers / "wait.py", cwd=tmp_path)
    pid = int(re.search(r"pid (\d+)", job.finish().stderr)[1])  # type: ignore[index]
    wait_until(lambda: (tmp_path / "ready_0").exists(), "the worker")
    assert os.getpgid(pid) != job.pid  # what the terminal signals is the group of the command that was typed
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_alive(pid), "the launcher's end")


@pytest.mark.parametrize(
    "words",
    [["no.py"], ["--rank_table_file=no.json", "train.py"], ["--device_target=gpu", "train.py"]],
    ids=["script", "table", "devices"],
)
def test_wrong_input_is_refused_before_detaching(msrun: JobRunner, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "train.py").touch()
    finished = msrun.run("--join=False", *words, cwd=tmp_path)
    assert finished.code == 2
    assert finished.errors == finished.stderr.splitlines()
    assert os.listdir(tmp_path) == ["train.py"]


def test_port_in_use_is_refused_before_detaching(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finished = msrun.run("--join=False", f"--master_port={taken.getsockname()[1]}", "train.py", cwd=tmp_path)
    assert finished.code == 2
    assert "Address already in use" in finished.stderr
    assert os.listdir(tmp_path) == ["train.py"]
