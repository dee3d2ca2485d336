"""The backend shm: random programs give what they must, and nobody waits for a rank that is gone.

MSRUN_FUZZ_CASES and MSRUN_FUZZ_SEED (by default 6 and 1) say how many programs and which.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_net import HostNet
from job_runner import REPOSITORY, JobRunner

PROGRAMS = int(os.environ.get("MSRUN_FUZZ_CASES", "6"))
SEED = int(os.environ.get("MSRUN_FUZZ_SEED", "1"))
PIDFD_OPEN, MEMFD_CREATE = 434, 319
DEADLINE_S = 60.0 + 5 * PROGRAMS

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.mark.parametrize("world_size", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_random_programs_give_what_every_rank_must_get(
    msrun: JobRunner, workers: Path, tmp_path: Path, world_size: int
) -> None:
    worker = workers / "runtime" / "shm_programs.py"
    msrun.run_world(
        world_size, worker, tmp_path / "result.json", str(SEED), str(PROGRAMS), cwd=tmp_path, deadline_s=DEADLINE_S
    )
    assert json.loads((tmp_path / "result.json").read_text()) == []


@pytest.fixture(scope="module")
def net() -> Iterator[HostNet]:
    """Two hosts."""
    with HostNet(2) as hosts:
        yield hosts


@pytest.mark.slow
@pytest.mark.parametrize("workers_of_hosts", [(2, 2), (3, 1)])
def test_random_programs_over_two_hosts(
    msrun: JobRunner, net: HostNet, workers: Path, tmp_path: Path, workers_of_hosts: tuple[int, int]
) -> None:
    words = ["--worker_num=4", f"--master_addr={net.address(0)}", workers / "runtime" / "shm_programs.py"]
    words += [tmp_path / "result.json", str(SEED), str(PROGRAMS)]
    hosts = [
        msrun.start(
            f"--node_rank={node}",
            f"--local_worker_num={count}",
            *words,
            cwd=tmp_path,
            prefix=net.prefix(node),
            log_dir=f"log_output/node_{node}" if node else "log_output",
        )
        for node, count in enumerate(workers_of_hosts)
    ]
    assert [host.finish(DEADLINE_S).code for host in hosts] == [0, 0]
    assert json.loads((tmp_path / "result.json").read_text()) == []


def run_failure(workers: Path, folder: Path, what: str, *, ranks: int) -> None:
    """Let ranks meet a failure; each writes what it was told."""
    command = [sys.executable, str(workers / "runtime" / "shm_failures.py"), str(folder), what, str(ranks)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environ, check=True, timeout=60)


TOLD = [
    ("killed", "rank 2 has ended while rank {rank} waits for it in all_reduce of 3 ranks, 4000000 x"),
    ("killed_before_pending", "rank 2 has ended while rank {rank} waits for it in all_reduce of 3"),
    ("killed_before_message", "rank 2 has ended while rank {rank} waits for it in"),
    ("left", "rank 2 has left the group while rank {rank} waits for it in barrier"),
    ("other_operation", "rank {rank} all_reduce of 3 ranks, 3 x float32, rank 2 all_reduce of 3 ranks, 4 x float"),
    ("own_time_out", "barrier of 3 ranks: Timed out after 0.2 s, waits for rank 2"),
    ("late", "all_reduce of 3 ranks, 4 x float32: Timed out after 0.2 s, waits for rank 2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "told"),
    [pytest.param(*row, marks=() if row[0] == "killed" else pytest.mark.slow, id=row[0]) for row in TOLD],
)
def test_others_are_told_within_a_second(workers: Path, tmp_path: Path, what: str, told: str) -> None:
    run_failure(workers, tmp_path, what, ranks=3)
    for rank in (0, 1):
        texts, took = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told.format(rank=rank) in texts[0]
        assert took < 3 if what != "late" else len(texts) == 1


@pytest.mark.slow
def test_rank_that_waits_for_the_turn_of_a_dead_one_is_told(workers: Path, tmp_path: Path) -> None:
    run_failure(workers, tmp_path, "killed_before_turn", ranks=3)
    texts, took = json.loads((tmp_path / "2.json").read_text())
    assert "rank 1 has ended while rank 2 waits for it in all_reduce of 3 ranks" in texts[0]
    assert took < 5


@pytest.mark.slow
def test_message_of_another_size_is_refused_where_it_arrives(workers: Path, tmp_path: Path) -> None:
    run_failure(workers, tmp_path, "other_size_of_message", ranks=2)
    assert "rank 1 has sent 16 bytes with tag 0, and rank 0 waits for 12" in (tmp_path / "0.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sparse", "older_names"])
def test_what_torch_asks_of_gloo_is_done(workers: Path, tmp_path: Path, what: str) -> None:
    run_failure(workers, tmp_path, what, ranks=3)
    for rank in range(3):
        assert json.loads((tmp_path / f"{rank}.json").read_text())[0] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "number", "rank"),
    [("pidfd_open", PIDFD_OPEN, 1), pytest.param("memfd_create", MEMFD_CREATE, 0, marks=pytest.mark.slow)],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
def test_job_that_may_not_share_memory_uses_gloo_and_says_so(
    msrun: JobRunner, workers: Path, tmp_path: Path, call: str, number: int, rank: int
) -> None:
    job = msrun.start(
        "--worker_num=3", workers / "runtime" / "shm_forbidden.py", tmp_path, str(number), str(rank), cwd=tmp_path
    ).finish(DEADLINE_S)
    assert job.code == 0, job.stderr
    said = f"the backend shm cannot run here (rank {rank}: {call}: Operation not permitted): gloo is used"
    logs = [(tmp_path / "log_output" / f"worker_{other}.log").read_text().count(said) for other in range(3)]
    assert logs == [1, 0, 0]
    found = [json.loads((tmp_path / f"{other}.json").read_text()) for other in range(3)]
    assert found == [["gloo", [6.0] * 3], ["gloo", [6.0] * 3], ["gloo", [3.0] * 3]]


@pytest.mark.slow
def test_operation_begun_in_inference_mode_ends_outside_it(workers: Path, tmp_path: Path) -> None:
    run_failure(workers, tmp_path, "inference", ranks=2)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text())[0] == []


@pytest.mark.slow
def test_operations_go_on_while_a_rank_waits_for_something_else(workers: Path, tmp_path: Path) -> None:
    run_failure(workers, tmp_path, "busy_elsewhere", ranks=3)
    for rank in range(3):
        texts, took = json.loads((tmp_path / f"{rank}.json").read_text())
        assert texts == []
        assert took < 10
