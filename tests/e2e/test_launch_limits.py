"""Limits of the kernel that a job runs into while it runs: named with their remedy, and the job ends."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import pytest
from job_runner import JobRunner


def test_rotated_logs_need_two_descriptors_for_each_worker(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    few = ["sh", "-c", 'ulimit -n 72 && exec "$@"', "sh"]  # 32 and one for each of 40 workers, not two
    job = msrun.run("--worker_num=40", "--log_max_bytes=1M", workers / "end.py", "all", "0", cwd=tmp_path, prefix=few)
    assert job.code == 3
    (line,) = job.stderr.splitlines()
    assert "72 open files allowed for each process, 40 workers with --log_max_bytes need 112; raise the hard " in line


@pytest.mark.slow
def test_msrun_raises_its_own_limit_and_workers_keep_that_of_the_user(msrun: JobRunner, tmp_path: Path) -> None:
    """40 workers with rotated logs need more descriptors than they may have themselves."""
    program = tmp_path / "limit.py"
    program.write_text("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))\n")
    few = ["prlimit", "--nofile=72:200"]
    job = msrun.run("--worker_num=40", "--log_max_bytes=1M", program, cwd=tmp_path, prefix=few)
    assert job.code == 0, job.stderr
    assert {job.log(rank) for rank in range(40)} == {b"(72, 200)\n"}


@pytest.mark.slow
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


@pytest.mark.slow
def test_job_runs_with_more_inherited_descriptors_than_select_can_take(msrun: JobRunner, tmp_path: Path) -> None:
    many = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "for _ in range(1100): os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    finished = msrun.run("--worker_num=1", "true", cwd=tmp_path, prefix=[sys.executable, "-c", many])
    assert finished.code == 0, finished.stderr


@pytest.mark.slow
def test_worker_that_cuts_off_the_progress_board_hurts_nobody_but_itself(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "cut.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.truncate(os.environ['MSRUN_PROGRESS'], 0)\n"
        "    time.sleep(1.2)  # the agent looks at the board each second\n"
        "    sys.exit(7)\n"
        "time.sleep(60)\n"
    )
    finished = msrun.run("--worker_num=2", "cut.py", cwd=tmp_path)
    assert finished.code == 7, finished.stderr
    assert finished.read_json("failure.json")["first_failure"]["global_rank"] == 1


def test_limit_on_address_space_that_ends_the_import_of_torch_is_named(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    small = ["sh", "-c", 'ulimit -v 400000 && exec "$@"', "sh"]
    finished = msrun.run("--worker_num=1", "--max_restarts=3", "train.py", cwd=tmp_path, prefix=small)
    assert finished.code != 0
    words = "ulimit -v 400000: it may have 400000 KiB of address space; raise the limit (RLIMIT_AS)"
    assert words in finished.stderr, finished.stderr
    assert "restart 1" not in finished.stderr, "it would end in the same way"


@pytest.mark.slow
def test_limit_on_cpu_time_is_named(msrun: JobRunner, tmp_path: Path) -> None:
    short = ["sh", "-c", 'ulimit -t 2 && exec "$@"', "sh"]
    finished = msrun.run("--worker_num=1", "sh", "-c", "while :; do :; done", cwd=tmp_path, prefix=short)
    assert finished.code in (137, 152)
    assert "ulimit -t 2: it may use 2 s of CPU time; raise the limit (RLIMIT_CPU)" in finished.errors[0]
