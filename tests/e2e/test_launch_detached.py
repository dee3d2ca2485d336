"""--join=False: the prompt comes back at once, the job goes on with all its guarantees and ends when told to."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, is_alive, wait_until


def start_detached(msrun: JobRunner, cwd: Path, *words: str | Path) -> int:
    """Return the process id of the launcher in the background."""
    finished = msrun.start("--worker_num=2", "--join=False", *words, cwd=cwd).finish()
    assert finished.code == 0
    log_dir = finished.log_dir
    match = re.fullmatch(
        rf"msrun: job (\S+) runs in the background as pid (\d+), logs in {log_dir}\n"
        rf"msrun: to look at it: msrun --status {log_dir}\nmsrun: to end it: msrun --stop {log_dir}\n",
        finished.stderr,
    )
    assert match, finished.stderr
    assert finished.read_json("plan.json")["job_id"] == match[1]
    return int(match[2])


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


@pytest.mark.slow
def test_detached_job_that_fails_tells_so_in_its_log(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    pid = start_detached(msrun, tmp_path, workers / "end.py", "1", "5")
    wait_until(lambda: not is_alive(pid), "the launcher's end")
    assert "failed first: exit code 5" in (tmp_path / "log_output" / "msrun.log").read_text()


@pytest.mark.slow
def test_detached_job_outlives_a_hangup_of_its_terminal(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = msrun.start("--worker_num=1", "--detach", workers / "wait.py", cwd=tmp_path)
    begun = job.finish()
    assert begun.code == 0
    pid = begun.read_json("job.lock")["pid"]
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


@pytest.mark.slow
def test_status_and_stop_work_as_soon_as_the_prompt_is_back(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    for _ in range(5):  # each in the directory of the one before
        pid = start_detached(msrun, tmp_path, workers / "wait.py")
        shown = msrun.start("--status", "log_output", cwd=tmp_path).finish()
        job_id = shown.read_json("plan.json")["job_id"]
        assert shown.code == 0, shown.stderr
        assert re.match(rf"job {job_id}: (starting|running)\nlauncher pid {pid} on ", shown.stdout.decode())
        stopped = msrun.start("--stop", "log_output", cwd=tmp_path).finish()
        assert stopped.code == 0
        assert stopped.stdout.decode() == f"job {job_id} has ended: interrupted: stopped by SIGTERM\n"
        msrun.prove_nothing_left(deadline_s=0)


def test_killed_background_launcher_leaves_no_worker_and_says_so(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    pid = start_detached(msrun, tmp_path, workers / "wait.py")
    wait_until(lambda: (tmp_path / "ready_0").exists() and (tmp_path / "ready_1").exists(), "both workers")
    os.kill(pid, signal.SIGKILL)
    msrun.prove_nothing_left()
    shown = msrun.start("--status", "log_output", cwd=tmp_path).finish()
    assert (shown.code, b": launcher died\n" in shown.stdout) == (1, True)


@pytest.mark.slow
def test_background_launcher_that_is_killed_before_it_began_is_told_in_the_foreground(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    program = (
        "import os, signal\nimport msrun.launch.job as job\n"
        "job.build_plan = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from msrun.cli import main\nmain()\n"
    )
    command = [sys.executable, "-c", program]
    finished = msrun.start("--join=False", workers / "wait.py", cwd=tmp_path, command=command).finish()
    assert finished.code == 128 + signal.SIGKILL
    assert "the background launcher was ended by SIGKILL before its job began" in finished.stderr
    for folder in msrun.temporary.glob("msrun-*"):  # of a killed launcher that had no fork server yet
        folder.rmdir()


@pytest.mark.slow
def test_quiet_says_nothing(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    finished = msrun.start("--worker_num=1", "--join=False", "--quiet", workers / "wait.py", cwd=tmp_path).finish()
    assert (finished.code, finished.stderr, finished.stdout) == (0, "", b"")
    assert msrun.start("--stop", "log_output", cwd=tmp_path).finish().code == 0


@pytest.mark.slow
@pytest.mark.parametrize("signum", one_fast(signal.SIGKILL, signal.SIGINT))
def test_command_that_is_ended_before_its_job_began_takes_the_job_along(
    msrun: JobRunner, workers: Path, tmp_path: Path, signum: int
) -> None:
    program = (
        "import pathlib, time\nimport msrun.launch.job as job\nbuild_plan = job.build_plan\n"
        "def slow(*args, **settings):\n"
        "    pathlib.Path('planning').touch()\n"
        "    while not pathlib.Path('go').exists():\n        time.sleep(0.01)\n"
        "    return build_plan(*args, **settings)\n"
        "job.build_plan = slow\nfrom msrun.cli import main\nmain()\n"
    )
    job = msrun.start("--join=False", workers / "wait.py", cwd=tmp_path, command=[sys.executable, "-c", program])
    job.wait_for(tmp_path / "planning")
    job.send(signum)
    if signum == signal.SIGKILL:
        job.process.wait(10)
    (tmp_path / "go").touch()
    assert job.process.wait(10) == (130 if signum == signal.SIGINT else -signal.SIGKILL)
    msrun.prove_nothing_left()
    assert not (tmp_path / "ready_0").exists()
    shown = msrun.start("--status", "log_output", cwd=tmp_path).finish()
    assert (shown.code, b": failed: the command that was to start it in the background" in shown.stdout) == (1, True)
