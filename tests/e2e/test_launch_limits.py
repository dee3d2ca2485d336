"""Limits of the kernel that a job runs into while it runs: named with their remedy, and the job ends."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from job_runner import JobRunner


def test_rotated_logs_need_two_descriptors_for_each_worker(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    few = ["sh", "-c", 'ulimit -n 72 && exec "$@"', "sh"]  # 32 and one for each of 40 workers, not two
    job = msrun.run("--worker_num=40", "--log_max_bytes=1M", workers / "end.py", "all", "0", cwd=tmp_path, prefix=few)
    assert job.code == 3
    (line,) = job.stderr.splitlines()
    assert "72 open files allowed for each process, 40 workers with --log_max_bytes need 112; raise the hard " in line


def test_msrun_raises_its_own_limit_and_workers_keep_that_of_the_user(msrun: JobRunner, tmp_path: Path) -> None:
    """40 workers with rotated logs need more descriptors than they may have themselves."""
    program = tmp_path / "limit.py"
    program.write_text("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))\n")
    few = ["prlimit", "--nofile=72:200"]
    job = msrun.run("--worker_num=40", "--log_max_bytes=1M", program, cwd=tmp_path, prefix=few)
    assert job.code == 0, job.stderr
    assert {job.log(rank) for rank in range(40)} == {b"(72, 200)\n"}


def test_pipes_of_logs_that_cannot_be_made_are_named(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    options = ("--worker_num=2", "--max_restarts=1", "--log_max_bytes=1M", workers / "wait.py")
    job = msrun.start(*options, cwd=tmp_path)
    job.wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    server = job.pid_of_fork_server()
    used = len(os.listdir(f"/proc/{server}/fd"))
    resource.prlimit(server, resource.RLIMIT_NOFILE, (used + 1, used + 1))
    os.kill(job.pid_of("1"), signal.SIGKILL)
    ended = job.finish()
    assert ended.code == 3
    words = "cannot make the pipes of the workers' logs: Too many open files; raise the limit with ulimit -n, on "
    assert words in ended.errors[0]
