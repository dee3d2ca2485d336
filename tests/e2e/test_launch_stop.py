"""`msrun --stop LOG_DIR` ends the job of that directory, only that one, and waits until it is gone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runner import REPOSITORY, Finished, JobRunner, Running, is_alive, wait_until

HOLDER = """
import signal, sys, time
from dataclasses import replace
from pathlib import Path
from msrun.launch.directory.lock import JobLock
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[3] == "ignore" else lambda *_: sys.exit(0))
lock = JobLock(Path(sys.argv[4]), "held")
lock._record = replace(lock._record, host=sys.argv[1] or lock._record.host, pid=int(sys.argv[2]) or lock._record.pid)
lock.take()
print("held", flush=True)
time.sleep(60)
"""
IMPATIENT = [
    sys.executable,
    "-c",
    (
        "from msrun.launch.status import stop\nstop.OVERTIME_S = stop.DEFAULT_GRACE_S = 0.1\n"
        "from msrun.cli import main\nmain()"
    ),
]
WITHOUT_PIDFD = [sys.executable, "-c", "import os\ndel os.pidfd_open\nfrom msrun.cli import main\nmain()"]


@contextlib.contextmanager
def holder(
    cwd: Path, *, host: str = "", pid: int = 0, term: str = "end", folder: str = "log_output"
) -> Iterator[subprocess.Popen[bytes]]:
    """Hold a lock as a launcher does whose record names this host and pid."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, host, str(pid), term, folder],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def start_waiting(msrun: JobRunner, workers: Path, cwd: Path, *words: str, log_dir: str = "log_output") -> Running:
    """Start a job of two workers that wait; they are there when this returns."""
    script = [workers / "wait.py", *[word for word in words if not word.startswith("--")]]
    options = [word for word in words if word.startswith("--")]
    job = msrun.start("--worker_num=2", f"--log_dir={log_dir}", *options, *script, cwd=cwd, log_dir=log_dir)
    job.wait_for(cwd / "ready_0", cwd / "ready_1")
    return job


def stop(msrun: JobRunner, cwd: Path, *words: str, log_dir: str = "log_output", **settings: list[str]) -> Finished:
    """Run `msrun --stop`."""
    return msrun.start("--stop", log_dir, *words, cwd=cwd, **settings).finish()  # type: ignore[arg-type]


def test_stop_ends_the_job_as_term_does_and_waits_until_it_is_gone(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    job = start_waiting(msrun, workers, tmp_path)
    stopped = stop(msrun, tmp_path)
    assert stopped.code == 0
    msrun.prove_nothing_left(deadline_s=0)
    job_id = job.finish().read_json("plan.json")["job_id"]
    assert stopped.stdout.decode() == f"job {job_id} has ended: interrupted: stopped by SIGTERM\n"
    assert stopped.stderr == f"msrun: stopping job {job_id} (pid {job.pid}), for up to 30 s\n"
    assert job.finish().code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_workers_that_ignore_term_are_killed_after_the_grace(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, workers, tmp_path, "--grace=0.3", "ignore-term")
    stopped = stop(msrun, tmp_path, "--quiet")
    assert (stopped.code, stopped.stderr) == (0, "")
    msrun.prove_nothing_left(deadline_s=0)
    assert job.finish().code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_job_that_had_ended_is_no_error(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    msrun.run("--worker_num=1", workers / "end.py", "all", "0", cwd=tmp_path)
    stopped = stop(msrun, tmp_path)
    assert (stopped.code, stopped.stderr) == (0, "")
    assert re.fullmatch(rb"job \S+ had ended before: finished successfully: .*\n", stopped.stdout)


@pytest.mark.slow
def test_several_at_once_all_see_the_end(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, workers, tmp_path, "--grace=0.5", "ignore-term")
    callers = [msrun.start("--stop", "log_output", cwd=tmp_path) for _ in range(4)]
    for caller in callers:
        finished = caller.finish()
        assert finished.code == 0
        assert re.search(rb"interrupted: stopped by SIGTERM\n", finished.stdout)
    assert job.finish().code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_job_that_is_still_importing_ends_too(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "endless.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(600)\n")
    env = {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    job = msrun.start("--worker_num=2", "--preload=endless", "train.py", cwd=tmp_path, env=env)
    job.wait_for(tmp_path / "importing")
    assert stop(msrun, tmp_path).code == 0
    assert job.finish().code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_launcher_that_was_suspended_ends(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, workers, tmp_path)
    job.send(signal.SIGSTOP)
    assert stop(msrun, tmp_path).code == 0
    assert job.finish().code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_stop_works_where_there_is_no_pidfd(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, workers, tmp_path)
    stopped = stop(msrun, tmp_path, command=WITHOUT_PIDFD)
    assert (stopped.code, b"stopped by SIGTERM" in stopped.stdout) == (0, True)
    assert job.finish().code == 128 + signal.SIGTERM


def test_only_the_job_of_that_directory_is_ended(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    jobs = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        jobs[name] = start_waiting(msrun, workers, tmp_path / name, log_dir="logs")
    assert stop(msrun, tmp_path, log_dir="one/logs").code == 0
    assert jobs["one"].finish().code == 128 + signal.SIGTERM
    assert jobs["two"].process.poll() is None
    for rank in ("0", "1"):
        assert is_alive(jobs["two"].pid_of(rank))
    shown = msrun.start("--status", "two/logs", cwd=tmp_path).finish()
    assert b": running\n" in shown.stdout
    assert not (tmp_path / "two" / "logs" / "failure.json").exists()
    assert stop(msrun, tmp_path, log_dir="two/logs").code == 0
    assert jobs["two"].finish().code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_pid_in_a_stale_record_is_never_signalled(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    finished = msrun.run("--worker_num=1", workers / "end.py", "all", "0", cwd=tmp_path)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as innocent:
        path = finished.log_dir / "job.lock"
        path.write_text(json.dumps({**json.loads(path.read_text()), "pid": innocent.pid}))
        assert b"had ended before" in stop(msrun, tmp_path).stdout
        with holder(tmp_path, pid=innocent.pid, folder=str(finished.log_dir)) as real:
            assert stop(msrun, tmp_path).code == 0
            assert real.wait(10) == 0
        assert innocent.poll() is None
        innocent.kill()


def test_job_of_another_host_is_left_alone(msrun: JobRunner, tmp_path: Path) -> None:
    with holder(tmp_path, host="elsewhere") as process:
        stopped = stop(msrun, tmp_path)
        assert process.poll() is None
    assert stopped.code == 3
    assert re.fullmatch(
        r"msrun: error: --stop \S+: job held \(pid \d+ on host elsewhere\) belongs to host elsewhere, "
        r"this is \S+; run msrun --stop there\n",
        stopped.stderr,
    )


@pytest.mark.parametrize("without_pidfd", [False, True], ids=["pidfd", "no pidfd"])
def test_job_that_does_not_end_is_named_with_a_way_out(msrun: JobRunner, tmp_path: Path, without_pidfd: bool) -> None:
    command = list(IMPATIENT)
    if without_pidfd:
        command[2] = f"import os\ndel os.pidfd_open\n{command[2]}"
    with holder(tmp_path, term="ignore") as process:
        stopped = stop(msrun, tmp_path, command=command)
        assert process.poll() is None
    assert stopped.code == 3
    assert f"job held has not ended within 0.2 s; kill -KILL {process.pid} ends it without" in stopped.stderr


@pytest.mark.slow
def test_directory_can_be_used_again_right_after_a_stop(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = start_waiting(msrun, workers, tmp_path)
    assert stop(msrun, tmp_path).code == 0
    second = msrun.start("--worker_num=1", workers / "end.py", "all", "0", cwd=tmp_path).finish()
    assert (second.code, second.log(0)) == (0, b"rank 0 begins\n")
    assert not (second.log_dir / "failure.json").exists()
    assert not (second.log_dir / "worker_1.log").exists()
    assert job.process.poll() is not None
    wait_until(lambda: not is_alive(job.pid), "the first launcher's end")
