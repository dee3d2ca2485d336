"""A process of msrun's own that is lost while the job runs: a failed attempt, after which the job starts again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import MARK, JobRunner, Running
from rehearsal import Rehearsals

from msrun import contract


def own_process(job: Running, lost: str, host: int = 0) -> int:
    """Return the process id of the fork server or of the scheduler of a host, as of now."""
    told = [json.loads(line) for line in (job.log_dir / contract.EVENTS_JSONL).read_text().splitlines()]
    if lost == "fork server":
        worker = next(event["pid"] for event in reversed(told) if event.get("global_rank") == host)
        return int(Path("/proc", str(worker), "stat").read_bytes().rpartition(b")")[2].split()[1])
    names = ("scheduler", "host_scheduler")
    mine = [event for event in told if event["event"] in names and event.get("node_rank", 0) == host]
    return int(mine[-1]["pid"])


def wait_for_attempt(folder: Path, job: Running, ranks: int, attempt: int) -> None:
    job.wait_for(*(folder / f"record_{rank}_{attempt}.json" for rank in range(ranks)))


@pytest.mark.parametrize(
    ("lost", "options"),
    one_fast(
        ("fork server", ()),
        ("scheduler", ()),
        ("scheduler", ("--log_max_bytes=4096",)),
        ("fork server", ("--log_max_bytes=4096",)),
        ("fork server", ("--start_method=exec",)),
        ("fork server", ("--interactive",)),
    ),
)
def test_job_that_has_lost_it_starts_again(
    msrun: JobRunner, workers: Path, tmp_path: Path, lost: str, options: tuple[str, ...]
) -> None:
    words = ["--worker_num=2", "--max_restarts=1", *options, workers / "attempt.py", "wait"]
    job = msrun.start(*words, cwd=tmp_path)
    wait_for_attempt(tmp_path, job, 2, 0)
    os.kill(own_process(job, lost), signal.SIGKILL)
    finished = job.finish()
    assert finished.code == 0, finished.stderr
    assert f"the {lost} ended" in finished.stderr and "starting all workers again now, restart 1" in finished.stderr
    assert [finished.log(rank).decode() for rank in range(2)] == [f"rank {rank} in attempt 1\n" for rank in range(2)]
    assert (finished.log_dir / "worker_1.attempt_0.log").read_text() == "rank 1 in attempt 0\n"
    record = (finished.log_dir / contract.SCHEDULER_LOG).read_text()
    assert f"attempt 1: the {lost} ended" in record and "job over: all workers ended with exit code 0" in record
    msrun.prove_nothing_left()


@pytest.mark.slow
def test_every_loss_uses_a_restart_up_and_the_last_one_ends_the_job(
    msrun: JobRunner, workers: Path, tmp_path: Path
) -> None:
    job = msrun.start("--worker_num=2", "--max_restarts=1", workers / "attempt.py", "wait=7:2", cwd=tmp_path)
    for attempt, lost in enumerate(("scheduler", "fork server")):
        wait_for_attempt(tmp_path, job, 2, attempt)
        os.kill(own_process(job, lost), signal.SIGKILL)
    finished = job.finish()
    assert finished.code == contract.EXIT_CLUSTER
    assert finished.errors == ["msrun: error: the fork server ended unexpectedly; every worker was stopped with it"]
    (earlier,) = finished.read_json(contract.FAILURE_JSON)["attempts"]
    assert earlier["reason"].startswith("the scheduler ended (signal SIGKILL)")


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "host"), one_fast(("fork server", 1), ("scheduler", 0), ("scheduler", 1)))
def test_host_that_has_lost_it_starts_again_with_the_others(
    msrun: JobRunner, workers: Path, tmp_path: Path, lost: str, host: int
) -> None:
    rehearsals = Rehearsals(msrun, tmp_path)
    job = rehearsals.start("2x1", "--max_restarts=1", workers / "attempt.py", "wait")
    wait_for_attempt(tmp_path, job, 2, 0)
    os.kill(own_process(job, lost, host), signal.SIGKILL)
    finished = job.finish()
    assert finished.code == 0, finished.stderr
    assert f"the {lost} ended" in finished.stderr and "restart 1" in finished.stderr
    assert [finished.log(rank).decode() for rank in range(2)] == [f"rank {rank} in attempt 1\n" for rank in range(2)]


STORE_PROGRAM = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.all_reduce(value := torch.ones(1))
pathlib.Path(f"record_{rank}_{attempt}.json").touch()
time.sleep(600 if attempt == "0" else 0)
print(f"rank {rank}: {value.item()}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["fork server", "scheduler"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_of_plain_torch_meet_again_at_a_new_store(
    msrun: JobRunner, tmp_path: Path, lost: str, hosts: int
) -> None:
    (tmp_path / "train.py").write_text(STORE_PROGRAM)
    where = ["--rehearse=2x1"] if hosts == 2 else ["--worker_num=2"]
    job = msrun.start(*where, f"--forward_env={MARK}", "--max_restarts=1", "train.py", cwd=tmp_path)
    wait_for_attempt(tmp_path, job, 2, 0)
    os.kill(own_process(job, lost), signal.SIGKILL)
    finished = job.finish()
    assert finished.code == 0, finished.stderr
    assert [finished.log(rank).decode() for rank in range(2)] == [f"rank {rank}: 2.0\n" for rank in range(2)]
