"""--keep_going: a rank that fails ends no other; the job fails when all have ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import JobRunner, wait_until

TRAIN = """
import os, sys, time
rank = os.environ["RANK"]
if rank == "1":
    sys.exit(7)
if rank == "2":
    while not os.path.exists("failed"):
        time.sleep(0.01)
    sys.exit(9)
while not os.path.exists("go"):
    time.sleep(0.01)
print("rank", rank, "has finished")
"""


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.parametrize("where", one_fast("--worker_num=4", "--rehearse=2x2"))
def test_others_run_to_their_end_and_the_first_failure_is_reported(msrun: JobRunner, cwd: Path, where: str) -> None:
    job = msrun.start(where, "--keep_going", "train.py", cwd=cwd)
    wait_until(
        lambda: (job.log_dir / "events.jsonl").exists() and '"exited"' in (job.log_dir / "events.jsonl").read_text(),
        "rank 1 has failed",
    )
    (cwd / "failed").touch()
    wait_until(lambda: (job.log_dir / "events.jsonl").read_text().count('"exited"') == 2, "rank 2 has failed")
    assert job.process.poll() is None
    (cwd / "go").touch()
    ended = job.finish()
    first, code, other = (1, 7, 2) if ended.code == 7 or where == "--worker_num=4" else (2, 9, 1)
    assert ended.code == code, ended.stderr  # of several hosts, that of the host whose ranks ended first
    assert f"rank {first} on " in ended.errors[0] and f"failed first: exit code {code}" in ended.errors[0]
    assert [ended.log(rank) for rank in (0, 3)] == [b"rank 0 has finished\n", b"rank 3 has finished\n"]
    states = {other["global_rank"]: other["state"] for other in ended.read_json("failure.json")["others"]}
    assert states.pop(other).startswith("failed") and states == {0: "done", 3: "done"}


@pytest.mark.parametrize("where", one_fast("--worker_num=4", "--rehearse=2x2"))
def test_a_signal_ends_all_after_a_failure_too(msrun: JobRunner, cwd: Path, where: str) -> None:
    job = msrun.start(where, "--keep_going", "train.py", cwd=cwd)
    wait_until(
        lambda: (job.log_dir / "events.jsonl").exists() and '"exited"' in (job.log_dir / "events.jsonl").read_text(),
        "rank 1 has failed",
    )
    job.send(signal.SIGTERM)
    ended = job.finish()
    assert ended.code != 0
    msrun.prove_nothing_left()


def test_the_job_starts_again_when_all_have_ended(msrun: JobRunner, cwd: Path) -> None:
    (cwd / "train.py").write_text(
        "import os, sys\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', attempt)\n"
        "sys.exit(5 if attempt + os.environ['RANK'] == '01' else 0)\n"
    )
    ended = msrun.run("--worker_num=2", "--keep_going", "--max_restarts=1", "--restart_on=5", "train.py", cwd=cwd)
    assert ended.code == 0, ended.stderr
    assert ended.log(0) == b"attempt 1\n"
    assert (ended.log_dir / "worker_0.attempt_0.log").read_bytes() == b"attempt 0\n"
