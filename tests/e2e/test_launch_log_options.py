"""--log_split, --log_time and --log_once: what is written where, and how lines of workers are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from job_runner import JobRunner

TRAIN = """
import os, sys
print("epoch 1")
print("rank", os.environ["RANK"])
print("to stderr", file=sys.stderr)
if sys.argv[1:] == ["fails"] and os.environ["RANK"] == "1":
    raise ValueError("no such data set")
"""


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.parametrize("where", ["--worker_num=2", "--rehearse=2x1"])
def test_stderr_has_a_log_of_its_own_and_is_stderr_here(msrun: JobRunner, cwd: Path, where: str) -> None:
    job = msrun.run(where, "--log_split", "train.py", cwd=cwd)
    assert job.code == 0, job.stderr
    for rank in (0, 1):
        assert job.log(rank) == f"epoch 1\nrank {rank}\n".encode()
        assert (job.log_dir / f"worker_{rank}.stderr.log").read_bytes() == b"to stderr\n"
        assert (cwd / "log_output" / f"worker_{rank}.stderr.log").read_bytes() == b"to stderr\n"
    assert job.stdout == b"epoch 1\nrank 0\n"
    assert "to stderr" in job.stderr.splitlines()


def test_a_failure_is_reported_from_the_log_that_has_the_traceback(msrun: JobRunner, cwd: Path) -> None:
    job = msrun.run("--worker_num=2", "--log_split", "--start_method=exec", "train.py", "fails", cwd=cwd)
    assert job.code == 1
    assert f"{job.log_dir}/worker_1.stderr.log" in job.stderr
    assert "ValueError: no such data set" in job.stderr


def test_all_that_a_job_wrote_is_removed_with_its_folder(msrun: JobRunner, cwd: Path) -> None:
    for _ in range(2):
        assert msrun.run("--worker_num=1", "--log_split", "--log_keep_jobs=1", "train.py", cwd=cwd).code == 0
    assert len([path for path in (cwd / "log_output").iterdir() if path.is_dir() and not path.is_symlink()]) == 1


def test_a_line_of_all_ranks_is_shown_once(msrun: JobRunner, cwd: Path) -> None:
    job = msrun.run("--worker_num=3", "--tail_worker_log=all", "--log_once", "train.py", cwd=cwd)
    lines = job.stdout.decode().splitlines()
    assert [line for line in lines if line.startswith("[x3] ")] == ["[x3] epoch 1", "[x3] to stderr"]
    assert sorted(re.sub(r"\[.*:", "[", line) for line in lines if "[x3]" not in line) == [
        f"[{rank}] rank {rank}" for rank in range(3)
    ]


def test_the_time_stands_before_each_line(msrun: JobRunner, cwd: Path) -> None:
    job = msrun.run("--worker_num=1", "--log_time", "train.py", cwd=cwd)
    lines = job.stdout.decode().splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d\.\d{3} ", "", line) for line in lines] == ["epoch 1", "rank 0", "to stderr"]
    assert not any(line in lines for line in ("epoch 1", "rank 0"))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--log_split", "--log_max_bytes=1M"), "a log that is rotated has both streams"),
        (("--log_once", "--raw"), "that shows bytes"),
        (("--log_time", "--interactive"), "a rank's terminal shows all"),
    ],
)
def test_what_cannot_be_together_is_refused(msrun: JobRunner, cwd: Path, options: tuple[str, ...], remedy: str) -> None:
    job = msrun.run("--worker_num=1", *options, "train.py", cwd=cwd)
    assert (job.code, len(job.stderr.splitlines())) == (2, 1)
    assert remedy in job.stderr
