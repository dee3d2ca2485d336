"""--time_limit: a job ends by itself after so long, in good order, on one host and on several."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_runner import JobRunner

TRAIN = """
import os, signal, sys, time

def save(signum, frame):
    open(f"saved_{os.environ['RANK']}", "w").write(signal.Signals(signum).name)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("training", flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and sys.argv[1:]:
    sys.exit(1)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--worker_num=2",), id="one host"),
        pytest.param(("--worker_num=2", "--rehearse=2"), id="two hosts", marks=pytest.mark.slow),
    ],
)
def test_workers_get_term_and_the_job_ends_with_124(msrun: JobRunner, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ended = msrun.run(*words, "--time_limit=3", "train.py", cwd=tmp_path)
    assert ended.code == 124, ended.stderr
    assert "stopped by --time_limit: the job has run for 3 s" in ended.stderr
    assert [(tmp_path / f"saved_{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]


@pytest.mark.slow
def test_the_time_of_earlier_attempts_counts_and_no_attempt_follows(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ended = msrun.run(
        "--worker_num=1", "--time_limit=3", "--max_restarts=3", "--restart_on=1", "train.py", "fail", cwd=tmp_path
    )
    assert ended.code == 124, ended.stderr
    assert (tmp_path / "saved_0").read_text() == "SIGTERM"
    assert len(list(ended.log_dir.glob("worker_0.attempt_*.log"))) == 1


def test_a_job_that_ends_before_is_not_touched(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('done')")
    assert msrun.run("--worker_num=1", "--time_limit=60", "train.py", cwd=tmp_path).code == 0
