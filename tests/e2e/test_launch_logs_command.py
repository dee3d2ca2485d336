"""`msrun status`, `watch`, `logs` and `stop`: a job is looked after without its directory being named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from job_runner import Finished, JobRunner, wait_until

TRAIN = """
import os, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
for step in range(3):
    print(f"attempt {attempt} step {step} of rank {rank}", flush=True)
open(f"ready_{rank}", "w").close()
while "wait" in sys.argv:
    time.sleep(0.05)
    if os.path.exists(f"go_{attempt}"):
        print(f"last words of rank {rank} in attempt {attempt}", flush=True)
        sys.exit(attempt == "0")
"""


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def test_the_last_lines_of_the_asked_ranks_are_shown_with_their_rank(
    msrun: JobRunner, msrun_here: Callable[..., Finished], cwd: Path
) -> None:
    assert msrun.run("--worker_num=3", "train.py", cwd=cwd).code == 0
    shown = msrun_here("logs", "-n", "2", "--ranks", "0,2", cwd=cwd)
    assert shown.stdout.decode().splitlines() == [
        "[0] attempt 0 step 1 of rank 0",
        "[0] attempt 0 step 2 of rank 0",
        "[2] attempt 0 step 1 of rank 2",
        "[2] attempt 0 step 2 of rank 2",
    ]
    alone = msrun_here("logs", "log_output", cwd=cwd)
    assert alone.stdout.decode().splitlines() == [f"attempt 0 step {step} of rank 0" for step in range(3)]
    status = msrun_here("status", cwd=cwd)
    assert (status.code, "finished successfully" in status.stdout.decode()) == (0, True)


def test_logs_are_followed_until_the_job_has_ended_also_over_a_restart(msrun: JobRunner, cwd: Path) -> None:
    job = msrun.start("--worker_num=2", "--max_restarts=1", "--restart_on=1", "train.py", "wait", cwd=cwd)
    job.wait_for(cwd / "ready_0", cwd / "ready_1")
    follower = msrun.start("logs", "-f", "--ranks=all", cwd=cwd)
    for attempt in (0, 1):
        for rank in (0, 1):
            wait_until(lambda a=attempt, r=rank: f"[{r}] attempt {a} step 2" in follower.stdout, "the log is shown")
        (cwd / f"go_{attempt}").touch()
    assert (job.finish().code, follower.finish().code) == (0, 0)
    lines = follower.stdout.splitlines()
    assert sorted(lines[-2:]) == [f"[{rank}] last words of rank {rank} in attempt 1" for rank in (0, 1)]
    assert len(lines) == len(set(lines))


def test_a_job_is_stopped_without_its_directory(msrun: JobRunner, cwd: Path) -> None:
    job = msrun.start("--worker_num=1", "train.py", "wait", cwd=cwd)
    job.wait_for(cwd / "ready_0")
    stopped = msrun.run("stop", cwd=cwd)
    assert stopped.code == 0, stopped.stderr
    assert job.finish().code == 143


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("logs",), "msrun logs {cwd}/log_output: no such directory; give the --log_dir of a job"),
        (("status", "nowhere"), "--status {cwd}/nowhere: no such directory; give the --log_dir of a job"),
        (("logs", "--rnk", "0"), "--rnk: no such option"),
    ],
)
def test_what_is_not_there_is_refused_in_a_line(
    msrun_here: Callable[..., Finished], cwd: Path, words: tuple[str, ...], said: str
) -> None:
    refused = msrun_here(*words, cwd=cwd)
    assert refused.code == 2
    assert said.format(cwd=cwd) in refused.stderr
