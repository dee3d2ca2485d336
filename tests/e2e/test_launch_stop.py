"""`--stop LOG_DIR` ends the job of a directory; with `--join=False` it goes on in the background until then."""

import os
import re
import signal
import sys

import pytest
from asked_cases import one_fast
from job_runner import WORKERS, is_alive, wait_until

HOLDER = """
import time
from dataclasses import replace
from pathlib import Path
from msrun.launch.directory.log_directory import JobLock
lock = JobLock(Path("log_output"), "held")
lock._record = replace(lock._record, host="elsewhere")
lock.take()
print("held", flush=True)
time.sleep(60)
"""


def stop(msrun, cwd, *words, log_dir="log_output", **settings):
    """Run `msrun --stop`."""
    return msrun.start("--stop", log_dir, *words, cwd=cwd, **settings).finish()


@pytest.mark.slow
def test_launcher_that_was_suspended_ends(msrun, tmp_path):
    job = msrun.start("--worker_num=2", "--grace=0.5", WORKERS / "wait.py", cwd=tmp_path).wait_for_workers(2)
    job.send(signal.SIGSTOP)
    assert stop(msrun, tmp_path).code == 0
    assert job.finish().code == 128 + signal.SIGTERM


def test_job_of_another_host_is_left_alone(msrun, msrun_here, tmp_path):
    holder = msrun.start(cwd=tmp_path, command=[sys.executable, "-c", HOLDER])
    wait_until(lambda: holder.stdout == "held\n", "the lock is held as by a launcher on another host")
    stopped = msrun_here("--stop", "log_output", cwd=tmp_path)
    assert holder.process.poll() is None
    holder.send(signal.SIGKILL)
    assert stopped.code == 3
    assert re.fullmatch(
        r"msrun: error: --stop \S+: job held \(pid \d+ on host elsewhere\) belongs to host elsewhere, "
        r"this is \S+; run msrun --stop there\n",
        stopped.stderr,
    )


# -- --join=False ------------


def start_detached(msrun, cwd, *words):
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


def test_detached_job_runs_and_ends_with_term(msrun, tmp_path):
    pid = start_detached(msrun, tmp_path, WORKERS / "wait.py")
    wait_until(lambda: (tmp_path / "ready_0").exists() and (tmp_path / "ready_1").exists(), "both workers")
    assert os.getsid(pid) == pid
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_alive(pid), "the launcher's end")
    msrun.prove_nothing_left()
    log = (tmp_path / "log_output" / "msrun.log").read_text()
    assert "msrun: error: stopped by SIGTERM" in log
    assert (tmp_path / "log_output" / "failure.json").exists()


@pytest.mark.slow
def test_status_and_stop_work_as_soon_as_the_prompt_is_back(msrun, tmp_path):
    for _ in range(5):  # each in the directory of the one before
        pid = start_detached(msrun, tmp_path, WORKERS / "wait.py")
        shown = msrun.start("--status", "log_output", cwd=tmp_path).finish()
        job_id = shown.read_json("plan.json")["job_id"]
        assert shown.code == 0, shown.stderr
        assert re.match(rf"job {job_id}: (starting|running)\nlauncher pid {pid} on ", shown.stdout.decode())
        stopped = msrun.start("--stop", "log_output", cwd=tmp_path).finish()
        assert stopped.code == 0
        assert stopped.stdout.decode() == f"job {job_id} has ended: interrupted: stopped by SIGTERM\n"
        msrun.prove_nothing_left(deadline_s=0)


@pytest.mark.slow
def test_killed_background_launcher_leaves_no_worker_and_says_so(msrun, tmp_path):
    pid = start_detached(msrun, tmp_path, WORKERS / "wait.py")
    wait_until(lambda: (tmp_path / "ready_0").exists() and (tmp_path / "ready_1").exists(), "both workers")
    os.kill(pid, signal.SIGKILL)
    msrun.prove_nothing_left()
    shown = msrun.start("--status", "log_output", cwd=tmp_path).finish()
    assert (shown.code, b": launcher died\n" in shown.stdout) == (1, True)


@pytest.mark.parametrize("signum", one_fast(signal.SIGINT, signal.SIGKILL))
def test_command_that_is_ended_early_takes_the_job_along(msrun, tmp_path, signum):
    program = (
        "import pathlib, time\nimport msrun.launch.job as job\nbuild_plan = job.build_plan\n"
        "def slow(*args, **settings):\n"
        "    pathlib.Path('planning').touch()\n"
        "    while not pathlib.Path('go').exists():\n        time.sleep(0.01)\n"
        "    return build_plan(*args, **settings)\n"
        "job.build_plan = slow\nfrom msrun.cli import main\nmain()\n"
    )
    job = msrun.start("--join=False", WORKERS / "wait.py", cwd=tmp_path, command=[sys.executable, "-c", program])
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
