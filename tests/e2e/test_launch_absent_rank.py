"""A rank that ends with 0 and never joins the world is named at once: the others would wait for it for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asked_cases import one_fast
from host_net import HostNet
from job_runner import Finished, JobRunner

RULE = "every rank has to call init() or init_process_group(), or none"


def assert_named(job: Finished, absent: str, come: str) -> None:
    assert job.code == 3, job.stderr
    assert (
        f"rank {absent} ended with exit code 0 without joining the world, and rank {come} needs it: {RULE}"
        in job.errors[0]
    )
    assert job.read_json("failure.json")["exit_code"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("how", one_fast("runtime", "plain", "late_import"))
@pytest.mark.parametrize("late_s", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_rank_that_ends_with_0_before_it_joins_is_named(
    msrun: JobRunner, workers: Path, tmp_path: Path, how: str, late_s: str
) -> None:
    job = msrun.run("--worker_num=2", workers / "absent.py", "1", how, late_s, cwd=tmp_path)
    assert_named(job, "1", "0")
    assert [worker["global_rank"] for worker in job.read_json("failure.json")["lagging"]] == [1]


@pytest.mark.slow
def test_rank_of_a_world_without_it_may_end(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = msrun.run("--worker_num=3", workers / "absent.py", "1", "smaller", cwd=tmp_path)
    assert job.code == 0, job.stderr


def test_ranks_that_join_nothing_may_end_when_they_like(msrun: JobRunner, workers: Path, tmp_path: Path) -> None:
    job = msrun.run("--worker_num=3", workers / "absent.py", "1", "nothing", "1", cwd=tmp_path)
    assert job.code == 0, job.stderr


OF_ANOTHER_HOST = [("1", "runtime"), ("1", "plain"), ("3", "plain")]


@pytest.fixture(scope="module")
def net() -> Iterator[HostNet]:
    """Two hosts for all tests of this module."""
    with HostNet(2) as hosts:
        yield hosts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "how"),
    [("0", "runtime"), *(pytest.param(rank, how, marks=pytest.mark.slow) for rank, how in OF_ANOTHER_HOST)],
)
def test_rank_of_another_host_is_named_on_all_hosts(
    msrun: JobRunner, net: HostNet, workers: Path, tmp_path: Path, absent: str, how: str
) -> None:
    jobs = [
        msrun.start(
            f"--master_addr={net.address(0)}",
            "--worker_num=4",
            "--local_worker_num=2",
            f"--node_rank={node}",
            workers / "absent.py",
            absent,
            how,
            cwd=tmp_path,
            prefix=net.prefix(node),
            log_dir=f"log_output/node_{node}" if node else "log_output",
        )
        for node in range(2)
    ]
    for job in jobs:
        ended = job.finish()
        assert ended.code == 3, ended.stderr
        assert f"rank {absent} ended with exit code 0 without joining the world" in ended.errors[0]


@pytest.mark.slow
def test_ranks_of_two_hosts_that_join_nothing_may_end_when_they_like(
    msrun: JobRunner, net: HostNet, workers: Path, tmp_path: Path
) -> None:
    jobs = [
        msrun.start(
            f"--master_addr={net.address(0)}",
            "--worker_num=2",
            "--local_worker_num=1",
            f"--node_rank={node}",
            workers / "absent.py",
            "0",
            "nothing",
            cwd=tmp_path,
            prefix=net.prefix(node),
            log_dir=f"log_output/node_{node}" if node else "log_output",
        )
        for node in range(2)
    ]
    assert [job.finish().code for job in jobs] == [0, 0]
